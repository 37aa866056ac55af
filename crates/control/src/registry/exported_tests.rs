//! Removal of several exports at once.

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
