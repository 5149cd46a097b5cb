// How are videos and sounds made? A video is a job that is asked after; a sound is the answer itself.

import { ServerError, createSound, createVideo, deleteVideo, readContent, readVideo } from "./api.js";

const POLL_MS = 500;

const pause = (signal) => new Promise((resolve, reject) => {
  const stop = () => { clearTimeout(timer); reject(new DOMException("Cancelled.", "AbortError")); };
  const timer = setTimeout(() => { signal.removeEventListener("abort", stop); resolve(); }, POLL_MS);
  signal.addEventListener("abort", stop, { once: true });
});

// Asks for a video, and watches it.
export async function makeVideo(request, files, signal, onJob, onPreview) {
  return watchVideo(await createVideo({ ...request, partial_images: 3 }, files, signal), signal, onJob, onPreview);
}

// Calls onJob whenever something is known, and onPreview with an image. Cancelling deletes the job.
export async function watchVideo(first, signal, onJob, onPreview) {
  let job = first;
  try {
    while (job.status === "queued" || job.status === "in_progress") {
      onJob(job);
      await pause(signal);
      job = await readVideo(job.id, signal);
      if (job.status === "in_progress" && job.samovar.has_preview) {
        const preview = await readContent(job.id, "thumbnail", signal).catch(unlessMissing); // It may be made by now.
        if (preview) onPreview(preview);
      }
    }
    if (job.status === "failed") throw new ServerError(200, job.error);
    return { job, file: await readContent(job.id, "video", signal) };
  } catch (error) {
    if (signal.aborted) await deleteVideo(job.id);
    throw error;
  }
}

function unlessMissing(error) {
  if (error.status !== 404) throw error;
}

export async function makeSound({ prompt, seconds, ...request }, signal) {
  const length = seconds === undefined ? {} : { audio_length: seconds };
  return createSound({ input: prompt, ...length, ...request }, signal);
}
