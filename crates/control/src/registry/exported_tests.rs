//! Removal of several exports at once, and exports of a disk of which a snapshot is taken.

use std::{rc::Rc, sync::Arc};

use export::nbd::{NbdServer, NbdServerTerms, Removal};
use policy::access::AccessRules;
use settings::ListenEndpoint;

use super::{NewNbdExport, Registry, RegistryError, RunningDisk};
use crate::running_server::RunningServer;

fn add_disk(registry: &Rc<Registry>, name: &str) {
    registry.add_disk(RunningDisk::in_memory(name, None)).expect("a new name");
}

fn export(id: &str, disk: &str) -> NewNbdExport {
    NewNbdExport {
        id: id.to_owned(),
        name: id.to_owned(),
        description: String::new(),
        access: AccessRules::default(),
        disk: disk.to_owned(),
        read_only: false,
        bitmaps: Arc::default(),
    }
}

#[test]
fn refused_removal_restores_only_its_own_exports() {
    reactor::sim::run(1, async {
        let registry = Registry::new(None, Rc::new(|_| ()));
        add_disk(&registry, "d");
        let server = NbdServer::new(None, NbdServerTerms::default());
        let serving = RunningServer::new(server, ListenEndpoint::Inherited, Vec::new(), &Rc::default());
        // In the order of their removal.
        for id in ["1-ending", "2-in-service", "3-gone"] {
            registry.add_export(&serving, export(id, "d")).expect("a new id");
        }
        let exports = registry.exports.of_disk("d");
        // Its end is not awaited, as if a request of its last client were in flight.
        let _ending = registry.begin_removal("1-ending", Removal::IfUnused).expect("it has no clients");
        // Its removal is complete, so removing it again fails after "2-in-service" was removed.
        registry.begin_removal("3-gone", Removal::IfUnused).expect("it has no clients").await;
        let refused = registry.remove_exports(&exports, Removal::IfUnused).await;
        assert!(matches!(refused, Err(RegistryError::UnknownExport(id)) if id == "3-gone"));
        let is_ending = |id| registry.exports.get(id).is_ok_and(|export| export.is_ending());
        assert!(is_ending("1-ending"), "it was removed before");
        assert!(registry.exports.get("2-in-service").is_ok() && !is_ending("2-in-service"));
    });
}

#[test]
fn no_device_is_added_while_a_snapshot_is_taken() {
    reactor::sim::run(1, async {
        let registry = Registry::new(None, Rc::new(|_| ()));
        add_disk(&registry, "d");
        let snapshot = registry.jobs.reserve_snapshot("d").expect("it is idle");
        let disk = registry.disks.get("d").expect("it was added");
        let target = settings::ExportTarget::Ublk(Default::default());
        let added = registry.add_endpoint("device".to_owned(), disk, false, &target, None).await;
        let expected = RegistryError::HasStartingJob { disk: "d".to_owned(), job: snapshot.id.clone() };
        assert_eq!(added.expect_err("refused").to_string(), expected.to_string());
        // An overlay changes nothing for other exports.
        let server = NbdServer::new(None, NbdServerTerms::default());
        let serving = RunningServer::new(server, ListenEndpoint::Inherited, Vec::new(), &Rc::default());
        registry.add_export(&serving, export("plain", "d")).expect("a new id");
    });
}

#[test]
fn names_of_reserved_nodes_are_taken_until_they_are_released() {
    reactor::sim::run(1, async {
        let registry = Registry::new(None, Rc::new(|_| ()));
        let names = ["node".to_owned()];
        registry.disks.reserve_nodes(&names);
        assert_eq!(registry.check_name("node"), Err(RegistryError::NameTaken("node".to_owned())));
        registry.disks.release_nodes(&names);
        assert_eq!(registry.check_name("node"), Ok(()));
    });
}
