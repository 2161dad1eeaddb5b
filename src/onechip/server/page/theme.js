// Before the first paint, so that a chosen theme does not flash: everything else is in modules, which run later.
try {
  const theme = JSON.parse(localStorage.getItem("onechip.theme"));
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden: the system's theme it is.
}
