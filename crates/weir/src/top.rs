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
use source::{SettingsUpdate, TopEventSource, WeirTopEvent};
use state::{TopAction, TopState};

use crate::client::{ControlAddress, ControlClient};

/// Runs until the user quits. Reconnects if the daemon goes away later.
pub(crate) fn run(arguments: TopArgs) -> Result<(), CommandFailure> {
    let target = ControlAddress::choose(arguments.qmp)
        .map_err(|message| CommandFailure::Usage(anyhow::Error::msg(message)))?;
    // Checked before connecting, so that the message does not depend on the daemon.
    if !screen::is_possible() {
        return Err(anyhow!(
            "top: standard input and output must be a terminal (`weir status` prints the same without one)"
        )
        .into());
    }
    // Connected before the screen is taken over: a wrong address is reported as by any command.
    let client = ControlClient::connect(&target)?;
    let source = TopEventSource::start(client, arguments.interval).context("top: cannot start a thread")?;
    let mut screen = Screen::enter().context("the terminal: cannot be drawn on")?;
    let state = TopState::new(target.to_string());
    Ok(run_loop(&mut screen, &source, state).context("the terminal: cannot be drawn on")?)
}

fn run_loop(screen: &mut Screen, source: &TopEventSource, mut state: TopState) -> io::Result<()> {
    let began = Instant::now();
    loop {
        screen.draw(|frame| view::draw(frame, &mut state))?;
        let action = match source.next() {
            WeirTopEvent::Input(TerminalEvent::Key(key)) => state.press(key),
            WeirTopEvent::Input(TerminalEvent::Resized) => None,
            WeirTopEvent::Input(TerminalEvent::Stop) => Some(TopAction::Leave(ExitKey::Stop)),
            WeirTopEvent::Input(TerminalEvent::End) => Some(TopAction::Leave(ExitKey::End)),
            WeirTopEvent::Report(report) => {
                state.add_report(*report, began.elapsed());
                None
            }
            WeirTopEvent::QueryFailed(message) => {
                state.set_unreachable(message);
                None
            }
            WeirTopEvent::Changed(result) => {
                state.finish_edit(result);
                None
            }
        };
        match action {
            Some(TopAction::Leave(ExitKey::End)) => return Ok(()),
            Some(TopAction::Leave(ExitKey::Stop)) => screen.suspend()?,
            Some(TopAction::Change { name, change }) => {
                source.request_change(SettingsUpdate { name, change });
            }
            None => {}
        }
    }
}
