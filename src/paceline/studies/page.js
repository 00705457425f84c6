"use strict";
// Without this script all charts are shown, of all learning rates, one below the other.
{
  const root = document.documentElement, all = (what) => [...document.querySelectorAll(what)];
  const press = (button, on) => button.setAttribute("aria-pressed", String(on));
  root.classList.add("js");

  for (const button of all("button[data-method]"))
    button.addEventListener("click", () =>
      press(button, !root.classList.toggle(`off${button.dataset.method}`)));

  const buttons = all("button[data-choice]");
  const choose = (chosen) => {
    for (const button of buttons) press(button, button === chosen);
    for (const chart of all("figure[data-choice]"))
      chart.classList.toggle("other", chart.dataset.choice !== chosen.dataset.choice);
  };
  for (const button of buttons) button.addEventListener("click", () => choose(button));
  const first = buttons.find((button) => button.getAttribute("aria-pressed") === "true");
  if (first) choose(first);
}
