//! `weir top`: what runs, live, on the whole screen of a terminal; and a place to change a limit
//! while watching.
//!
//! ```text
//!   keyboard ─┐
//!   signals ──┼─► source (one channel) ─► state (what to show, what a key means) ─► view (how it looks)
//!   daemon ───┘                             │
//!      ▲                                    │ a change of settings
//!      └────────────────────────────────────┘
//! ```
//!
//! `state` and all below it know no terminal and no socket, so tests press keys and hand in
//! reports. Never leaves the terminal as it is: not at the end, nor after a panic, a signal or a
//! stop.

mod arguments;
mod field;
mod history;
mod list;
mod source;
mod state;
mod view;

use std::{io, time::Instant};

use anyhow::{Context as _, anyhow};
pub(crate) use arguments::{EXAMPLES, TopArgs};
use console::{
    CommandFailure,
    input::TerminalEvent,
    keys::ExitKey,
    screen::{self, Screen},
};
use source::{Asked, Event, Source};
use state::{Action, State};

use crate::client::{Client, Target};

/// A daemon that goes away later is waited for.
pub(crate) fn run(arguments: TopArgs) -> Result<(), CommandFailure> {
    let target = Target::choose(arguments.qmp).map_err(|said| CommandFailure::Usage(anyhow::Error::msg(said)))?;
    if !screen::is_possible() {
        return Err(anyhow!(
            "top: standard input and output are no terminal to draw on (`weir status` prints the same)"
        )
        .into());
    }
    let client = Client::connect(&target)?;
    let source = Source::start(client, arguments.interval).context("top: cannot start a thread")?;
    let mut screen = Screen::enter().context("the terminal: cannot be drawn on")?;
    let state = State::new(target.to_string());
    Ok(watch(&mut screen, &source, state).context("the terminal: cannot be drawn on")?)
}

fn watch(screen: &mut Screen, source: &Source, mut state: State) -> io::Result<()> {
    let began = Instant::now();
    loop {
        screen.draw(|frame| view::draw(frame, &mut state))?;
        let action = match source.next() {
            Event::Input(TerminalEvent::Key(key)) => state.press(key),
            Event::Input(TerminalEvent::Resized) => None,
            Event::Input(TerminalEvent::Stop) => Some(Action::Leave(ExitKey::Stop)),
            Event::Input(TerminalEvent::End) => Some(Action::Leave(ExitKey::End)),
            Event::Report(report) => {
                state.learn(*report, began.elapsed());
                None
            }
            Event::Unreachable(said) => {
                state.lose(said);
                None
            }
            Event::Changed(result) => {
                state.changed(result);
                None
            }
        };
        match action {
            Some(Action::Leave(ExitKey::End)) => return Ok(()),
            Some(Action::Leave(ExitKey::Stop)) => screen.suspend()?,
            Some(Action::Change { name, change }) => source.ask(Asked { name, change }),
            None => {}
        }
    }
}
