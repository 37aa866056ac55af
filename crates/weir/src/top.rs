//! `weir top`: disks and groups, live, on the whole terminal; limits can be changed meanwhile.
//!
//! ```text
//!   keyboard ─┐
//!   signals ──┼─► source (one channel) ─► state (content, meaning of keys) ─► view (layout, drawing)
//!   daemon ───┘                             │
//!      ▲                                    │ a change of settings
//!      └────────────────────────────────────┘
//! ```
//!
//! `state` and the modules that it uses access neither the terminal nor the socket, so tests press
//! keys and pass reports. Always restores the terminal: at the end, and after a panic, a signal or
//! a stop.

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

/// Runs until the user quits. Reconnects if the daemon goes away later.
pub(crate) fn run(arguments: TopArgs) -> Result<(), CommandFailure> {
    let target = Target::choose(arguments.qmp).map_err(|said| CommandFailure::Usage(anyhow::Error::msg(said)))?;
    // Checked before connecting, so that the message does not depend on the daemon.
    if !screen::is_possible() {
        return Err(anyhow!(
            "top: standard input and output must be a terminal (`weir status` prints the same without one)"
        )
        .into());
    }
    // Connected before the screen is taken over: a wrong address is reported as by any command.
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
