// Where the data of a study comes from: the server, or, in a report, the file itself.

const embedded = document.getElementById("frozen");
export const frozen = embedded ? JSON.parse(embedded.textContent) : null;

export async function signIn() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname + "#/");
  const answer = await send("session", { token });
  if (!answer.ok) throw new Error(await answer.text());
}

function send(name, body) {
  return fetch(`/api/${name}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Shoal": "1" },
    body: JSON.stringify(body),
  });
}

async function get(name, given = {}) {
  const answer = await fetch(`/api/${name}?${new URLSearchParams(given)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

export async function loadStudies() {
  return frozen ? { folder: "", studies: [{ name: frozen.state.study, study: {} }] } : get("studies");
}

export async function loadState(study) {
  return frozen ? frozen.state : get("state", { study });
}

export async function loadOverview(study) {
  return frozen ? frozen.overview : get("overview", { study });
}

export async function loadSpace(study) {
  return frozen ? frozen.space : get("space", { study });
}

export async function loadCurves(study, metric) {
  return frozen ? frozen.curves[metric] ?? { metric, stride: 1, curves: {} } : get("curves", { study, metric });
}

export async function loadTrial(study, trial) {
  if (!frozen) return get("trial", { study, trial });
  const reports = new Map();
  for (const [metric, found] of Object.entries(frozen.curves)) {
    const [epochs, times, values] = found.curves[trial] ?? [[], [], []];
    epochs.forEach((epoch, index) => {
      if (!reports.has(epoch)) reports.set(epoch, [trial, epoch, times[index], {}]);
      reports.get(epoch)[3][metric] = values[index];
    });
  }
  return { trial, reports: [...reports.values()].sort((one, other) => one[1] - other[1]), proof: "", checkpoints: null };
}

export async function loadLog(study, job) {
  return frozen ? null : get("log", { study, job });
}

export async function request(study, body) {
  const answer = await send(`request?${new URLSearchParams({ study })}`, body);
  if (!answer.ok) throw new Error(await answer.text());
}

export function follow(study, position, onChange, onLink) {
  if (frozen) return () => {};
  let stream = null;
  const seen = () => {
    stream?.close(); // a hidden tab must not hold one of the few connections that a browser has to a server
    if (document.hidden) return;
    stream = new EventSource(`/api/events?${new URLSearchParams({ study, position })}`);
    stream.onopen = () => onLink(true);
    stream.onerror = () => onLink(false);
    stream.onmessage = (event) => { position = event.lastEventId; onChange(JSON.parse(event.data)); };
  };
  document.addEventListener("visibilitychange", seen);
  seen();
  return () => { document.removeEventListener("visibilitychange", seen); stream?.close(); };
}
