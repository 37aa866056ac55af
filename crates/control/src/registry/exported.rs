//! How clients reach disks: servers of NBD with their exports, and exports with doors of their own,
//! from when they are opened until their last clients have gone.
//!
//! An id names one export, also while it is on its way out. Nobody is let in before the daemon is
//! ready. When the last client was to be the end, it is told from here. Never opens an image.

use std::{cell::Cell, rc::Rc, sync::Arc};

use anyhow::anyhow;
use export::nbd::{self, NotRemoved, Removal};

use super::{DoorTerms, End, Refused, Registry};
use crate::{
    change::Change,
    doors::{self, Entrance, Taken},
    exports::{Door, NewExport, RunningExport},
    running::RunningDisk,
    serving::Serving,
};

impl Registry {
    /// What is opened from now on lets nobody in before [`Registry::let_clients_in`], but devices
    /// of this host: the kernel reads one to make it.
    pub fn keep_clients_out(&self) {
        self.lifecycle.keeps_out.set(true);
    }

    /// Everything that is open, and is opened later, has clients from now on.
    pub fn let_clients_in(self: &Rc<Self>) {
        self.lifecycle.keeps_out.set(false);
        for serving in self.exports.servers() {
            self.accept(&serving);
        }
        for export in self.exports.all() {
            if let Door::Own(entrance) = &export.door {
                self.accept_at(&export.id, entrance);
            }
        }
    }

    /// Lets clients of NBD in there, unless that has to wait.
    pub(crate) fn accept(&self, serving: &Serving) {
        if !self.lifecycle.keeps_out.get() {
            let ender = Rc::clone(&self.lifecycle.ender);
            serving.accept(move |error| ender(End::Broken(error)));
        }
    }

    /// Adds an NBD server.
    pub fn add_server(self: &Rc<Self>, serving: &Rc<Serving>) {
        self.exports.insert_server(serving);
        if self.lifecycle.ends_when_idle.get() {
            // It may wait for ever, and must keep nothing by it.
            let (server, registry) = (Arc::clone(&serving.server), Rc::downgrade(self));
            reactor::spawn(async move {
                server.wait_while(|_| registry.upgrade().is_some_and(|registry| !registry.is_idle())).await;
                if let Some(registry) = registry.upgrade() {
                    (registry.lifecycle.ender)(End::Idle);
                }
            });
        }
    }

    /// Takes a server away with all its exports; returns when its last client has gone.
    pub(crate) async fn stop_server(self: &Rc<Self>, serving: &Rc<Serving>) {
        self.exports.remove_server(serving);
        serving.close();
        for export in self.exports.all() {
            if matches!(&export.door, Door::Nbd(of, _) if Rc::ptr_eq(of, serving)) {
                let _ = self.remove_export(&export.id, Removal::Hard);
            }
        }
        serving.stop().await;
    }

    /// Whether clients have been served, and none is left.
    fn is_idle(&self) -> bool {
        let served = || {
            self.exports.servers().iter().any(|serving| serving.server.has_served())
                || self.exports.entrances().iter().any(|entrance| entrance.server.has_served())
        };
        self.exports.connections() == 0 && (self.lifecycle.lost_device.get() || served())
    }

    pub(crate) fn add_export(&self, serving: &Rc<Serving>, new: NewExport) -> Result<(), Refused> {
        let disk = self.disks.get(&new.disk)?;
        if self.exports.has_id(&new.id) {
            return Err(Refused::IdTaken(new.id));
        }
        let export = nbd::NbdServerExport {
            name: new.name.as_str().into(),
            description: new.description.as_str().into(),
            disk: Arc::clone(&disk.disk),
            read_only: new.read_only,
            bitmaps: Arc::clone(&new.bitmaps),
            access: new.access.clone(),
        };
        let Some(number) = serving.server.add(export) else {
            return Err(Refused::ExportNameTaken { name: new.name, address: serving.address() });
        };
        let export = RunningExport {
            id: new.id.clone(),
            name: new.name.clone(),
            disk,
            door: Door::Nbd(Rc::clone(serving), number),
            said: None,
            read_only: new.read_only,
            added: Cell::new(false),
            ending: Cell::new(false),
            new: Some(new),
        };
        self.exports.insert(export);
        Ok(())
    }

    /// An export with a door of its own, which is open when this returns, and made of what another
    /// daemon had if that is passed. Its address.
    pub(crate) async fn add_door(
        self: &Rc<Self>,
        id: String,
        disk: Rc<RunningDisk>,
        read_only: bool,
        door: &settings::ExportTarget,
        taken: Option<Taken>,
    ) -> anyhow::Result<String> {
        if self.exports.has_id(&id) {
            return Err(Refused::IdTaken(id).into());
        }
        if taken.is_none() {
            self.exports.check_socket(door)?;
        }
        self.sandbox().map_or(Ok(()), |sandbox| sandbox.check_export(door))?;
        let DoorTerms { workers, access, inherited, .. } = self.exports.door_terms()?;
        let read_only = read_only || door.read_only() || disk.disk.image().is_read_only();
        // What another has is not served before it gives it up.
        let is_at_once = taken.is_none();
        let taken = Cell::new(taken);
        let events = &self.events;
        let terms =
            doors::Terms { id: &id, disk: &disk, read_only, access, inherited, workers, events, taken };
        let entrance = doors::open(door, &terms).await.map_err(|error| match (self.sandbox(), door) {
            (Some(sandbox), settings::ExportTarget::VhostUserBlk(machine)) if !machine.client => {
                // Of a socket that cannot be made, that is why.
                machine.socket.path().and_then(|path| sandbox.check_socket(path).err()).unwrap_or(error)
            }
            _ => error,
        })?;
        let address = entrance.address().to_owned();
        if (is_at_once && entrance.device().is_some()) || !self.lifecycle.keeps_out.get() {
            self.accept_at(&id, &entrance);
        }
        // Making a device takes a while, in which others have their turn.
        let name = disk.disk.name().to_string();
        let refused = match self.disks.get(&name) {
            Ok(still) if Rc::ptr_eq(&still, &disk) && !self.exports.contains(&id) => None,
            Ok(still) if Rc::ptr_eq(&still, &disk) => Some(Refused::IdTaken(id.clone())),
            _ => Some(Refused::NoDisk(name.clone())),
        };
        if let Some(refused) = refused {
            entrance.stop().await;
            return Err(refused.into());
        }
        if self.lifecycle.ends_when_idle.get() {
            let (server, registry) = (Arc::clone(&entrance.server), Rc::downgrade(self));
            reactor::spawn(async move {
                let busy = || registry.upgrade().is_some_and(|registry| !registry.is_idle());
                server.wait_while(Box::new(busy)).await;
                if let Some(registry) = registry.upgrade() {
                    (registry.lifecycle.ender)(End::Idle);
                }
            });
        }
        let export = RunningExport {
            id: id.clone(),
            name,
            disk,
            door: Door::Own(entrance),
            said: Some(door.clone()),
            new: None,
            read_only,
            added: Cell::new(false),
            ending: Cell::new(false),
        };
        self.exports.insert(export);
        Ok(address)
    }

    fn accept_at(self: &Rc<Self>, id: &str, entrance: &Rc<Entrance>) {
        let (registry, id) = (Rc::downgrade(self), id.to_owned());
        entrance.accept(move |result| {
            if let Some(registry) = registry.upgrade() {
                registry.door_ended(&id, result);
            }
        });
    }

    /// Nobody closed it: its device was removed from outside, or it can let nobody in any more.
    fn door_ended(self: &Rc<Self>, id: &str, result: std::io::Result<()>) {
        let Ok(export) = self.exports.get(id) else { return };
        let Door::Own(entrance) = &export.door else { return };
        let address = entrance.address();
        if entrance.device().is_none() {
            if let Err(error) = result {
                let error = anyhow!("{address}: no machine can connect any more: {error} (restart weir)");
                (self.lifecycle.ender)(End::Broken(error));
            }
            return;
        }
        match result {
            Ok(()) => tracing::info!(export = id, device = address, "the device has gone"),
            Err(error) => tracing::error!(export = id, device = address, %error, "the device has broken"),
        }
        self.lifecycle.lost_device.set(true);
        // It has no clients any more.
        let _ = self.remove_export(id, Removal::Hard);
    }

    /// No client finds the export any more when this returns. Its id and its disk stay in use until
    /// its last client is gone and [`Change::ExportDeleted`] follows.
    pub(crate) fn remove_export(self: &Rc<Self>, id: &str, removal: Removal) -> Result<(), Refused> {
        let (registry, removal) = (Rc::clone(self), self.removal(id, removal)?);
        reactor::spawn(async move {
            let gone = removal.await;
            gone.iter().for_each(|gone| registry.tell(gone));
        });
        Ok(())
    }

    /// The same. The future waits for the export's last client, also if the export was removed
    /// before, and returns the change to announce: none if the export was never announced, or if
    /// its first removal announces it.
    pub(crate) fn removal(
        self: &Rc<Self>,
        id: &str,
        removal: Removal,
    ) -> Result<impl Future<Output = Option<Change>> + 'static, Refused> {
        let export = self.exports.get(id)?;
        let is_gone = match export.door.remove(removal) {
            Ok(()) => false,
            // Removed already, and on its way out: nothing is left to refuse.
            Err(NotRemoved::Unknown) => true,
            Err(NotRemoved::InUse { .. }) => {
                return Err(Refused::HasClients { id: id.to_owned(), clients: export.clients() });
            }
        };
        export.ending.set(true);
        let registry = Rc::clone(self);
        Ok(async move {
            export.door.wait_until_unused().await;
            let is_listed =
                registry.exports.find(&export.id).is_some_and(|known| Rc::ptr_eq(&known, &export));
            if is_listed {
                registry.exports.remove(&export);
            }
            if is_gone {
                return None;
            }
            if registry.lifecycle.ends_when_idle.get() && registry.is_idle() {
                (registry.lifecycle.ender)(End::Idle);
            }
            // Of one that never was, nobody has heard.
            let is_known = !registry.disks.is_arriving(export.disk.disk.name());
            is_known.then(|| Change::ExportDeleted { id: export.id.clone() })
        })
    }

    /// Removes all of `exports` and waits for their last clients; or none, if a client has
    /// connected to one of them meanwhile. Exports that were ending before stay removed in either
    /// case, and a refused removal does not wait for them.
    pub(crate) async fn remove_exports(
        self: &Rc<Self>,
        exports: &[Rc<RunningExport>],
        removal: Removal,
    ) -> Result<(), Refused> {
        let mut ends = Vec::new();
        // Those over NBD can be put back.
        let (nbd, own): (Vec<_>, Vec<_>) =
            exports.iter().partition(|export| matches!(export.door, Door::Nbd(..)));
        let mut refused = None;
        for export in nbd.iter().chain(&own) {
            let was_ending = export.is_ending();
            match self.removal(&export.id, removal) {
                Ok(end) => ends.push((export, was_ending, end)),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        for (export, was_ending, end) in ends {
            if was_ending && refused.is_some() {
                continue;
            }
            let gone = end.await;
            if refused.is_some()
                && let (Door::Nbd(serving, _), Some(new)) = (&export.door, &export.new)
            {
                match self.add_export(serving, new.clone()).and_then(|()| self.exports.get(&export.id)) {
                    Ok(again) => {
                        again.added.set(export.added.get());
                        continue;
                    }
                    // Its name or its id was given to another export meanwhile.
                    Err(error) => {
                        tracing::error!(export = %export.id, "the export cannot be put back: {error}");
                    }
                }
            }
            gone.iter().for_each(|gone| self.tell(gone));
        }
        refused.map_or(Ok(()), Err)
    }

    /// Removes a disk and all its exports. If its file system stops answering while requests of the
    /// exports are in flight, the disk is given up, which ends them.
    ///
    /// # Errors
    /// [`Removal::Safe`] is refused if an export has clients; then nothing is removed.
    pub(crate) async fn remove_disk_and_exports(
        self: &Rc<Self>,
        name: &str,
        removal: Removal,
    ) -> Result<(), Refused> {
        let exports = self.exports.of_disk(name);
        let data = Arc::clone(&self.disks.get(name)?.disk);
        data.run_unless_unresponsive(self.remove_exports(&exports, removal)).await?;
        drop((exports, data));
        self.remove_disk(name).await
    }
}
