//! The control sockets of a daemon: connects what runs, the commands that change it, and the server
//! that clients speak to. Changes become events here.

use std::{cell::RefCell, rc::Rc};

use block::reactor::{self, JoinHandle, op::Fd};
use serde_json::json;

use super::{
    command::Commands,
    commands::TABLE,
    event::Events,
    server::{Ending, Server},
};
use crate::{
    control::{change::Change, inventory::Inventory},
    listen::{Listener, SocketFile},
};

#[derive(Debug)]
pub(crate) struct Control {
    server: Rc<Server>,
    /// Dropping one ends the accepting.
    accepting: RefCell<Vec<JoinHandle<()>>>,
    /// Removed when dropped.
    socket_files: RefCell<Vec<SocketFile>>,
}

impl Control {
    pub(crate) fn start(inventory: &Rc<Inventory>, listeners: Vec<Listener>) -> Self {
        let events = Events::default();
        let commands = Rc::new(Commands::new(TABLE, Rc::clone(inventory)));
        let server = Server::new(commands, events.clone());
        inventory.listen(move |change| tell(&events, change));
        let (mut accepting, mut socket_files) = (Vec::new(), Vec::new());
        for listener in listeners {
            let address = listener.authority().to_string();
            let (socket, file) = listener.into_parts();
            socket_files.extend(file);
            let server = Rc::clone(&server);
            accepting.push(reactor::spawn_joinable(async move {
                // The disks are served on: a daemon that cannot be steered is better than none.
                if let Err(error) = server.listen(Fd::from(socket)).await {
                    tracing::error!(address, %error, "QMP clients cannot be accepted any more (restart weir)");
                }
            }));
        }
        Self { server, accepting: RefCell::new(accepting), socket_files: RefCell::new(socket_files) }
    }

    /// Lets nobody in any more, tells every client why, and returns when the last is gone.
    pub(crate) async fn stop(&self, ending: Ending) {
        self.accepting.take();
        self.socket_files.take();
        self.server.stop(ending).await;
    }
}

fn tell(events: &Events, change: &Change) {
    match change {
        Change::ExportDeleted { id } => events.emit("BLOCK_EXPORT_DELETED", json!({ "id": id })),
        // QEMU has no event for it.
        Change::Listed { .. } => {}
        Change::SettingsChanged { name } => events.emit("X_WEIR_SETTINGS_CHANGED", json!({ "name": name })),
    }
}
