"""Protein design."""

from __future__ import annotations

from typing import Any

import torch

from . import Case, cond, noise, time, tokens

RESIDUES, LATENT, ATOMS = 11, 5, 37


def _design(step: int) -> dict[str, Any]:
    """One chain of residues to design from nothing; times count upwards."""
    progress = 1.0 - time(step, scale=1.0)
    residue = torch.arange(RESIDUES)
    everything = torch.ones(1, RESIDUES, dtype=torch.bool)
    contacts = ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord")
    return {
        "bb_ca": noise(step, 1, RESIDUES, 3, name="backbone"),
        "local_latents": noise(step, 1, RESIDUES, LATENT),
        "bb_ca_time": progress,
        "local_latents_time": progress**2,
        "padding_mask": everything,
        "token_type": torch.zeros(1, RESIDUES, dtype=torch.long),
        "atom37_mask": torch.ones(1, RESIDUES, ATOMS, dtype=torch.bool),
        "conditioning": {
            **{
                f"condition_{contact}_1_atom": tokens(contact, 1, RESIDUES, ATOMS, vocabulary=2) for contact in contacts
            },
            "condition_ChainCentroid_1_atom": cond("centroid", 1, RESIDUES, 3),
            "condition_index-group_1_token": torch.zeros(1, RESIDUES, dtype=torch.long),
            "molecule_iid": torch.zeros(1, RESIDUES, dtype=torch.long),
            "molecule_entity_id": torch.zeros(1, RESIDUES, dtype=torch.long),
            "token_bond_path_length": (residue[:, None] - residue).abs()[None],
            "is_in_context_conditioning": ~everything,
            "supports_local_latent": everything,
        },
    }


def _design_recycling(step: int) -> dict[str, Any]:
    return _design(step) | {"recycle_depth": 2}


PROTEINA = {
    "nlayers": 3,
    "token_dim": 24,
    "nheads": 2,
    "dim_cond": 16,
    "pair_repr_dim": 20,
    "latent_dim": LATENT,
    "token_type_emb_dim": 4,
    "cath_emb_dim": 2,
    "t_emb_dim": 14,
    "seq_sep_dim": 8,
    "xt_pair_dist_dim": 6,
    "update_pair_repr_every_n": 1,
    "tri_mult_c": 10,
    "num_sequence_classes": 9,
    "recycle_conditioning_dim": 3,
}

CASES = (
    Case(
        "RFD4ProteinaTransformer",
        PROTEINA,
        _design,
        notes="attention hides behind the names mhba and mha; the side modules make the next block's pairs",
    ),
    Case(
        "RFD4ProteinaTransformer",
        PROTEINA,
        _design_recycling,
        variant="recycling",
        notes="the stack runs twice in one forward, and the pairs go from the first pass into the second",
    ),
)
