//! `weir cgroup top`: cgroups, and the tasks in one of them, live on the terminal.
//!
//! ```text
//!   keyboard, signals ─► console::input ─┐
//!   survey, every interval ──────────────┴─► one channel ─► state (rows, keys) ─► view (drawing)
//! ```
//!
//! `state` and `view` use neither the terminal nor the kernel's files.

mod state;
mod view;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use console::{Failure, input, input::Input, keys::Leave, screen, screen::Screen};
use state::State;

use super::{
    rates::{Snapshot, Wish},
    survey::Survey,
};
use crate::{
    hierarchy::{Hierarchy, Roots},
    show::arguments::TopArgs,
};

enum Event {
    Input(Input),
    Looked(Wish, anyhow::Result<Snapshot>),
}

/// Runs until the user quits. A cgroup that disappears after the start is shown again when it
/// returns.
pub(crate) fn top(arguments: TopArgs) -> Result<(), Failure> {
    if !screen::is_possible() {
        let said = "cgroup top: standard input and output are no terminal to draw on (`weir cgroup show` prints the same)";
        return Err(anyhow!(said).into());
    }
    let named: Vec<String> = arguments.group.into_iter().collect();
    let hierarchy = Hierarchy::discover(Roots::default())?;
    let survey = Survey::new(hierarchy, arguments.kept.path(), &named, arguments.device.as_deref(), false)?;
    let state = State::new(survey.wish());
    // Tasks are numerous and read only while they are shown.
    let has_tasks = Arc::new(AtomicBool::new(false));
    let (events, happened) = mpsc::channel();
    let inputs = events.clone();
    let heard = input::listen(move |input| inputs.send(Event::Input(input)).is_ok());
    heard.context("cgroup top: cannot start a thread")?;
    let wanted = Arc::clone(&has_tasks);
    thread::Builder::new()
        .name("survey".to_owned())
        .spawn(move || look(&survey, &wanted, &events, arguments.interval))
        .context("cgroup top: cannot start a thread")?;
    let mut screen = Screen::enter().context("the terminal: cannot be drawn on")?;
    Ok(watch(&mut screen, &happened, state, &has_tasks).context("the terminal: cannot be drawn on")?)
}

fn watch(
    screen: &mut Screen,
    happened: &Receiver<Event>,
    mut state: State,
    has_tasks: &AtomicBool,
) -> io::Result<()> {
    loop {
        screen.draw(|frame| view::draw(frame, &mut state))?;
        let action = match happened.recv().unwrap_or(Event::Input(Input::End)) {
            Event::Input(Input::Key(key)) => state.press(key),
            Event::Input(Input::Resized) => None,
            Event::Input(Input::Stop) => Some(Leave::Stop),
            Event::Input(Input::End) => Some(Leave::End),
            Event::Looked(wish, result) => {
                state.learn(wish, result);
                None
            }
        };
        has_tasks.store(state.has_tasks(), Ordering::Relaxed);
        match action {
            Some(Leave::End) => return Ok(()),
            Some(Leave::Stop) => screen.stop()?,
            None => {}
        }
    }
}

fn look(survey: &Survey, has_tasks: &AtomicBool, events: &Sender<Event>, interval: Duration) {
    loop {
        let looked = survey.look(has_tasks.load(Ordering::Relaxed));
        if events.send(Event::Looked(survey.wish(), looked)).is_err() {
            return;
        }
        thread::sleep(interval);
    }
}
