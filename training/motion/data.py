"""The emoji that the video model knows, and what a machine without a network needs to train it.

    python -m training.motion.data --data data --out carry

Takes the named emoji out of the folder that `training.dataset` wrote and trains a tokenizer on all
captions. The names are of things that look unlike each other and have an upper side: a turn must show.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from training import pictures, vocabulary
from training.motion.clips import all_captions
from training.pictures import Dataset

PIECES = 1024
STYLES = ("flat", "3d")
NAMES = """
skull|alien|alien monster|robot|red heart|blue heart|green heart|broken heart|thumbs up|thumbs down|waving hand|
grinning face|angry face|clown face|crying face|nerd face|cold face|eye|brain|tooth|baby|astronaut|ninja|
monkey face|gorilla|dog face|poodle|wolf|fox|raccoon|cat face|black cat|lion|tiger face|horse face|unicorn|zebra|
deer|cow face|pig face|ram|camel|llama|giraffe|elephant|rhinoceros|hippopotamus|mouse face|hamster|rabbit face|
hedgehog|bat|bear|koala|panda|sloth|skunk|kangaroo|turkey|rooster|baby chick|penguin|dove|eagle|duck|swan|owl|
flamingo|peacock|parrot|frog|crocodile|turtle|snake|dragon face|sauropod|t-rex|spouting whale|dolphin|tropical fish|
blowfish|shark|octopus|spiral shell|crab|lobster|squid|snail|butterfly|honeybee|lady beetle|spider|scorpion|rose|
sunflower|tulip|potted plant|evergreen tree|palm tree|cactus|maple leaf|mushroom|grapes|watermelon|lemon|banana|
pineapple|red apple|green apple|pear|peach|cherries|strawberry|tomato|avocado|eggplant|carrot|hot pepper|broccoli|
croissant|pretzel|pancakes|waffle|cheese wedge|poultry leg|bacon|hamburger|french fries|pizza|hot dog|taco|popcorn|
ice cream|doughnut|birthday cake|cupcake|lollipop|honey pot|hot beverage|teapot|wine glass|cocktail glass|beer mug|
bubble tea|volcano|house|castle|tent|ferris wheel|locomotive|bus|ambulance|fire engine|police car|taxi|automobile|
tractor|racing car|motorcycle|bicycle|skateboard|anchor|sailboat|airplane|helicopter|rocket|flying saucer|luggage|
hourglass done|alarm clock|crescent moon|sun|ringed planet|star|cloud|tornado|rainbow|umbrella|high voltage|snowman|
comet|fire|droplet|jack-o-lantern|christmas tree|balloon|party popper|wrapped gift|trophy|american football|
boxing glove|ice skate|kite|crystal ball|magic wand|video game|teddy bear|artist palette|glasses|necktie|t-shirt|
jeans|dress|backpack|running shoe|crown|top hat|ring|gem stone|megaphone|bell|microphone|saxophone|trumpet|guitar|
violin|drum|mobile phone|telephone|laptop|floppy disk|television|camera|candle|light bulb|closed book|newspaper|
money bag|envelope|package|pencil|paintbrush|calendar|pushpin|scissors|key|hammer|axe|bomb|shield|gear|magnet|
ladder|microscope|telescope|syringe|pill|door|chair|toilet|bathtub|broom|bucket|warning|up arrow|recycling symbol|
check mark|cross mark
"""


def names() -> list[str]:
    return [name.strip() for name in NAMES.replace("\n", "").split("|")]


def choose(dataset: Dataset, limit: int | None = None) -> Dataset:
    """The named emoji in both styles, by name and then style; a name without a picture is refused."""
    found = {(row.name, row.style): index for index, row in enumerate(dataset.rows)}
    wanted = [(name, style) for name in names()[:limit] for style in STYLES]
    missing = [pair for pair in wanted if pair not in found]
    if missing:
        raise ValueError(f"no picture of {missing[:5]}: correct NAMES in {__file__}")
    index = [found[pair] for pair in wanted]
    sources = {key: source for key, source in dataset.sources.items() if key != "noto"}
    return Dataset(dataset.pictures[index], tuple(dataset.rows[i] for i in index), sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="what training.dataset wrote")
    parser.add_argument("--out", type=Path, default=Path("carry"), help="the folder to write")
    args = parser.parse_args()
    dataset = choose(pictures.load(args.data))
    pictures.save(args.out, dataset)
    texts = [text for some in all_captions(dataset.rows) for text in some]
    vocabulary.build_t5([*texts, *[vocabulary.PROMPT_WORDS] * 20], PIECES, args.out / "tokenizer")
    print(f"{len(dataset.rows)} pictures of {len(names())} emoji in {args.out}")


if __name__ == "__main__":
    main()
