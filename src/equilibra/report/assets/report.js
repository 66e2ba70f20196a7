"use strict";
/* Start: the answer is drawn at once, the rest when its arrays are unpacked. */
(async () => {
  const fail = (text) => {
    const box = document.getElementById("failure");
    box.textContent = text;
    box.hidden = false;
  };
  try {
    Theme.start();
    Answer.start();
    Layers.start();
    Memory.start();
    if (typeof DecompressionStream === "undefined") {
      ["load", "drill", "timeline"].forEach((id) => { document.getElementById(id).hidden = true; });
      fail("This browser cannot unpack the data of the heat maps, copies and timeline (it lacks DecompressionStream). Use Chrome 80, Firefox 113, Safari 16.4 or newer to see them.");
      document.documentElement.dataset.ready = "partly";
      return;
    }
    const [before, after] = Data.run.pair;
    Object.assign(State.values, { before, after });
    Object.assign(State.values, await Drill.worst());
    await Heat.start();
    await Drill.start();
    await Gantt.start();
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    fail(`This report cannot be shown in full: ${error.message}`);
    document.documentElement.dataset.ready = "failed";
    throw error;
  }
})();
