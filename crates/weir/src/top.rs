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
    Failure,
    input::Input,
    keys::Leave,
    screen::{self, Screen},
};
use source::{Asked, Event, Source};
use state::{Action, State};

use crate::client::{Client, Target};

/// A daemon that goes away later is waited for.
pub(crate) fn run(arguments: TopArgs) -> Result<(), Failure> {
    let target = Target::choose(arguments.qmp).map_err(|said| Failure::Usage(anyhow::Error::msg(said)))?;
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
            Event::Input(Input::Key(key)) => state.press(key),
            Event::Input(Input::Resized) => None,
            Event::Input(Input::Stop) => Some(Action::Leave(Leave::Stop)),
            Event::Input(Input::End) => Some(Action::Leave(Leave::End)),
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
            Some(Action::Leave(Leave::End)) => return Ok(()),
            Some(Action::Leave(Leave::Stop)) => screen.stop()?,
            Some(Action::Change { name, change }) => source.ask(Asked { name, change }),
            None => {}
        }
    }
}
