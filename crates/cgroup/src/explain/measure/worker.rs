//! The parent's side of the process inside the cgroup: start, orders, replies, termination.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::load::{LoadOrder, LoadReply};

/// Killed when dropped.
#[derive(Debug)]
pub(super) struct LoadWorker {
    child: Child,
    orders: ChildStdin,
    replies: Receiver<String>,
    /// True if the next reply belongs to an order that timed out.
    is_behind: bool,
}

impl LoadWorker {
    pub(super) fn start(directory: &Path) -> anyhow::Result<Self> {
        // The running program, even if its file has been replaced since the start.
        let mut child = Command::new("/proc/self/exe")
            .args(["cgroup", "load"])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the load process cannot be started")?;
        let (Some(orders), Some(out)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("the load process has no pipes");
        };
        let (sender, replies) = mpsc::channel();
        // A thread reads the replies, because a pipe cannot be read with a timeout.
        let listen = move || {
            for line in BufReader::new(out).lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("answers".to_owned())
            .spawn(listen)
            .context("no thread can be started")?;
        Ok(Self { child, orders, replies, is_behind: false })
    }

    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Returns a closure that kills the process, for the signal handler.
    pub(super) fn end(&self) -> impl Fn() + Send + 'static + use<> {
        let process = i32::try_from(self.child.id()).ok();
        move || {
            if let Some(process) = process {
                let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
            }
        }
    }

    pub(super) fn run_order(&mut self, order: &LoadOrder, within: Duration) -> anyhow::Result<LoadReply> {
        if self.is_behind {
            bail!("the previous measurement has not ended yet");
        }
        let mut line = serde_json::to_string(order).context("an order")?;
        line.push('\n');
        self.orders.write_all(line.as_bytes()).context("the load process has ended")?;
        let received = self.replies.recv_timeout(within);
        let Ok(reply_line) = received else {
            self.is_behind = true;
            bail!("not completed within {} s", within.as_secs());
        };
        let reply: LoadReply =
            serde_json::from_str(&reply_line).context("malformed reply of the load process")?;
        match reply.error {
            Some(error) => bail!("{error}"),
            None => Ok(reply),
        }
    }
}

impl Drop for LoadWorker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
