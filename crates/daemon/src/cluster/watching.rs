//! Tasks that hand on what etcd says of changes, beside the thread's own work.

use async_channel::Sender;

use super::{etcd::Watch, words::Input};

/// Aborts a task when it goes.
#[derive(Debug)]
pub(super) struct Watching(tokio::task::AbortHandle);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Hands on what a watch says.
pub(super) fn forward(mut watch: Watch, session: u64, inbox: Sender<Input>) -> Watching {
    let task = tokio::spawn(async move {
        loop {
            match watch.next().await {
                Ok(events) if events.is_empty() => {}
                Ok(events) => {
                    if inbox.send(Input::Watched(session, events)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let _ = inbox.send(Input::Ended(session, error.to_string())).await;
                    return;
                }
            }
        }
    });
    Watching(task.abort_handle())
}
