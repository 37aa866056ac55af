//! Tests of failed retries, and of the names that an unavailable disk reserves.

use std::{collections::BTreeSet, fs, os::unix::net::UnixListener, path::Path, rc::Rc, sync::Arc};

use anyhow::anyhow;
use export::nbd::{NbdServer, NbdServerTerms, Removal};
use policy::access::AccessRules;
use reactor::sim;
use serde_json::json;
use settings::{DesiredState, ListenEndpoint, SocketAccess, TlsConfig, config};

use super::*;
use crate::{
    add_objects,
    assemble::DiskAssembly,
    events::Kind,
    listen::InheritedSockets,
    reconcile::placements::{GroupOrDisk, MemberPlacement},
    registry::{NewNbdExport, RunningDisk},
    running_server::RunningServer,
    watch,
};

const FAR: &str = "[disk.far]\nimage = \"memory:1M\"\n\
    export = [{ type = \"nbd\", listen = \"unix:/first\" }, { type = \"nbd\", listen = \"unix:/second\" }]\n";

fn server(path: &str) -> Rc<RunningServer> {
    let endpoint = ListenEndpoint::Address(settings::ListenAddress::Unix(path.into()));
    RunningServer::new(NbdServer::new(None, NbdServerTerms::default()), endpoint, Vec::new(), &Rc::default())
}

fn export(name: &str, disk: &str) -> NewNbdExport {
    NewNbdExport {
        id: format!("of-{disk}"),
        name: name.to_owned(),
        description: String::new(),
        access: AccessRules::default(),
        disk: disk.to_owned(),
        read_only: false,
        bitmaps: Arc::default(),
    }
}

/// Registry with the unavailable disk `far`, and with the first of its two NBD servers.
async fn registry_with_unavailable_disk() -> (Rc<Registry>, Rc<RunningServer>) {
    let registry = Registry::new(None, Rc::new(|_| ()));
    let first = server("/first");
    registry.add_server(&first);
    retry_later(&registry, FAR).await;
    (registry, first)
}

/// Retries the disk `far` of a config, whose image can be opened.
async fn retry_later(registry: &Rc<Registry>, config: &str) {
    let parsed = config::parse("weir.toml", config, Path::new("/")).expect("a config");
    let plan = Rc::new(DesiredState::new(parsed, 0).expect("a plan"));
    let request = DiskAssembly::new(None, RateBudgets::default())
        .open_request(&plan.disks[0])
        .await
        .expect("no secrets");
    let state = UnavailableImageState::Failed(anyhow!("no answer"));
    registry.retry_later("far", plan, UnavailableImage { request, since: reactor::now(), state });
}

fn kinds(registry: &Registry) -> Vec<Kind> {
    registry.events.since(0).iter().map(|event| event.kind).collect()
}

#[test]
fn failed_retries_are_reported_once_and_rolled_back() {
    sim::run(1, async {
        let (registry, first) = registry_with_unavailable_disk().await;
        let _watch = watch::watch_registry(&registry, BTreeSet::new());
        for _ in 0..4 {
            // Each attempt fails, since the second server is missing.
            reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
            assert!(registry.disks.is_unavailable("far") && registry.disks.all().is_empty());
            assert!(registry.exports.all().is_empty() && registry.disks.unlisted_operation().is_none());
        }
        assert_eq!(kinds(&registry), [Kind::DiskUnavailable]);
        registry.add_server(&server("/second"));
        reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
        assert!(!registry.disks.is_unavailable("far"));
        assert_eq!(registry.exports.all().len(), 2);
        assert!(registry.exports.has_export_at(&first));
        assert_eq!(kinds(&registry)[1..], [Kind::DiskAdded]);
    });
}

#[test]
fn passed_socket_survives_failed_retries() {
    let directory = tempfile::tempdir().expect("a directory");
    let missing = directory.path().join("missing");
    let passed = UnixListener::bind(directory.path().join("passed")).expect("a free path");
    sim::run(1, async move {
        let registry = Registry::new(None, Rc::new(|_| ()));
        // The simulated reactor accepts no clients at sockets of the kernel.
        registry.delay_clients();
        let mut inherited = InheritedSockets::empty();
        inherited.add("vm", passed.into());
        registry.exports.set_endpoint_parameters(
            &Rc::default(),
            &SocketAccess::default(),
            NbdServerTerms::default(),
            inherited,
            &TlsConfig::Off,
        );
        let config = format!(
            "[disk.far]\nimage = \"memory:1M\"\n\
             export = [{{ type = \"vhost-user-blk\", listen = \"fd:vm\" }}, \
             {{ type = \"vhost-user-blk\", listen = \"unix:{}/socket\" }}]\n",
            missing.display()
        );
        retry_later(&registry, &config).await;
        let _watch = watch::watch_registry(&registry, BTreeSet::new());
        for _ in 0..3 {
            // Each attempt adds the first export, and fails at the second.
            reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
            assert!(registry.disks.is_unavailable("far") && registry.exports.all().is_empty());
        }
        assert_eq!(kinds(&registry), [Kind::DiskUnavailable]);
        fs::create_dir(&missing).expect("it did not exist");
        // The attempt of this instant may have run before.
        reactor::sleep_until(reactor::now() + RETRY_INTERVAL * 2).await;
        assert!(!registry.disks.is_unavailable("far"));
        assert_eq!(registry.exports.all().len(), 2);
    });
}

#[test]
fn unavailable_disk_reserves_its_export_names() {
    sim::run(1, async {
        let (registry, first) = registry_with_unavailable_disk().await;
        registry.add_disk(RunningDisk::in_memory("near", None)).expect("a new name");
        let refused = registry.add_export(&first, export("far", "near")).expect_err("reserved");
        assert!(refused.to_string().contains("reserved for disk far"), "{refused}");
        registry.add_export(&first, export("near", "near")).expect("another name");
        registry.remove_export("of-near", Removal::IfUnused).expect("no clients");
        reactor::yield_now().await;
        assert!(registry.abandon_unavailable("far"));
        registry.add_export(&first, export("far", "near")).expect("no longer reserved");
    });
}

#[test]
fn unmet_reservation_is_booked_after_a_removal() {
    sim::run(1, async {
        let registry = Registry::new(None, Rc::new(|_| ()));
        registry.book_when_possible();
        let keys = json!({ "iops-total": 1000 });
        add_objects::add_group(&registry, "g", keys.as_object().expect("keys")).await.expect("a new name");
        let group = registry.groups.get("g").expect("added");
        for (name, iops) in [("a", 800), ("b", 0)] {
            let disk = RunningDisk::in_memory(name, Some(&group));
            let node = GroupOrDisk::Disk(Arc::clone(&disk.disk));
            let mut placement = MemberPlacement::current(&node);
            placement.settings.share = placement.settings.share.with_reservation(iops, 0);
            placement.apply().expect("there is room");
            registry.add_disk(disk).expect("a new name");
        }
        let reserved = || {
            let share = registry.disks.get("b").expect("listed").disk.throttle().settings().share;
            (share.iops_reservation(), registry.groups.unmet.borrow().len())
        };
        registry.book_later("b", [600, 0]);
        assert_eq!(reserved(), (0, 1));
        registry.remove_disk("a").await.expect("unused");
        assert_eq!(reserved(), (600, 0));
    });
}
