//! Start, reload, dry run and retry of plans whose disks are in memory.

use std::{cell::Cell, fs, os::unix::net::UnixListener, path::Path, rc::Rc};

use api::ReloadChange;
use cluster::ClusterMembership;
use export::nbd::{NbdServerTerms, Removal};
use image::open_raw;
use serde_json::json;
use settings::{DesiredState, ExportTarget, SocketAccess, TlsConfig, config};
use storage::{OpenOptions, rate::RateBudgets};

use super::{PlanDifference, ReconcileReason, Reconciliation, source::FreshStart};
use crate::{
    add_objects::NewDisk,
    change::RegistryChange,
    listen::{AddressConflictRule, InheritedSockets},
    registry::{Registry, RunningDisk},
};

const DISKS: &str = "[group.g]\niops-total = 1000\n\
    [disk.a]\nimage = \"memory:1M\"\ngroup = \"g\"\n[disk.b]\nimage = \"memory:2M\"\n";

/// The plan of a config file.
fn plan_of_file(text: &str) -> DesiredState {
    let parsed = config::parse("weir.toml", text, Path::new("/")).expect("a config");
    let passed_sockets = usize::from(text.contains("fd:"));
    DesiredState::new(parsed, passed_sockets).expect("a plan")
}

/// The plan of disks without exports. Its server would listen on a socket that the tests never
/// bind.
fn plan(text: &str) -> DesiredState {
    let mut plan = plan_of_file(&format!("[daemon]\nnbd = \"fd:never-bound\"\n{text}"));
    plan.servers.clear();
    plan
}

fn work<'a>(
    occasion: ReconcileReason,
    registry: &'a Rc<Registry>,
    plan: &'a DesiredState,
) -> Reconciliation<'a> {
    Reconciliation::new(occasion, registry, plan, None, RateBudgets::default())
}

async fn start(registry: &Rc<Registry>, plan: &DesiredState) {
    let (difference, late) = PlanDifference::from_empty(registry, plan, |_| false).await.expect("new names");
    assert!(late.new_disks.is_empty() && late.new_exports.is_empty());
    let mut work = work(ReconcileReason::Start, registry, plan);
    let images = work.open(&difference, &FreshStart).await.expect("memory");
    work.apply(&difference, images, &mut FreshStart).await.expect("nothing is missing");
}

/// Reports of a reload between two plans, or its error.
async fn reload(
    registry: &Rc<Registry>,
    [before, after]: [&DesiredState; 2],
) -> Result<Vec<ReloadChange>, String> {
    let difference =
        PlanDifference::between(registry, Some(before), after).await.map_err(|error| format!("{error:#}"))?;
    let mut work = work(ReconcileReason::Reload, registry, after);
    // Every test of a reload also checks its dry run.
    let dry = work.dry_run(&difference).await.map_err(|error| format!("{error:#}"))?;
    work.reconcile(&difference, &mut FreshStart).await.map_err(|error| format!("{error:#}"))?;
    work.remove_old(&difference, before).await;
    assert_eq!(dry, work.reports, "a dry run reports what the reload does");
    Ok(std::mem::take(&mut work.reports))
}

fn names(registry: &Registry) -> (Vec<String>, Vec<String>) {
    let disks = registry.disks.all().iter().map(|disk| disk.disk.name().to_string()).collect();
    (disks, registry.groups.all().iter().map(|group| group.name().to_owned()).collect())
}

fn on_simulation(test: impl AsyncFnOnce(Rc<Registry>) + 'static) {
    reactor::sim::run(1, async { test(Registry::new(Some("/weir.toml".into()), Rc::new(|_| ()))).await });
}

#[test]
fn reload_of_the_started_plan_changes_nothing() {
    on_simulation(async |registry| {
        let plan = plan(DISKS);
        start(&registry, &plan).await;
        assert_eq!(names(&registry), (vec!["a".to_owned(), "b".to_owned()], vec!["g".to_owned()]));
        let a = registry.disks.get("a").expect("listed");
        assert_eq!(a.disk.throttle().group().expect("in a group").name(), "g");
        assert_eq!(reload(&registry, [&plan, &plan]).await, Ok(Vec::new()));
    });
}

#[test]
fn a_reload_reports_each_change_as_its_dry_run_does() {
    on_simulation(async |registry| {
        let before = plan(DISKS);
        start(&registry, &before).await;
        let after = plan(
            "[group.h]\niops-total = 10\n[disk.b]\nimage = \"memory:2M\"\ngroup = \"h\"\n\
             [disk.c]\nimage = \"memory:3M\"\n",
        );
        let reports = reload(&registry, [&before, &after]).await.expect("possible");
        let short = |report: &ReloadChange| format!("{} {} {}", report.kind, report.name, report.change);
        let lines: Vec<_> = reports.iter().map(short).collect();
        let expected = ["group h added", "disk b set", "disk c added", "disk a removed", "group g removed"];
        assert_eq!(lines, expected);
        assert_eq!(names(&registry), (vec!["b".to_owned(), "c".to_owned()], vec!["h".to_owned()]));
    });
}

#[test]
fn a_reload_rejects_a_target_around_that_of_an_added_disk() {
    on_simulation(async |registry| {
        let before = plan(DISKS);
        start(&registry, &before).await;
        // Not in the reloaded file, as if a client had added it.
        let added = "[group.g]\niops-total = 1000\n\
                     [disk.x]\nimage = \"memory:1M\"\ngroup = \"g\"\nlatency-target = \"1ms\"\n";
        start(&registry, &plan(added)).await;
        let after = plan(&DISKS.replace("[group.g]\n", "[group.g]\nlatency-target = \"5ms\"\n"));
        let rule = "weir.toml:4: group.g.latency-target = \"5ms\": cannot be set for a group around \
                    \"x\", which has a latency-target of its own (remove one of them)";
        let difference = PlanDifference::between(&registry, Some(&before), &after).await.expect("possible");
        let mut work = work(ReconcileReason::Reload, &registry, &after);
        let dry = work.dry_run(&difference).await.expect_err("nested");
        assert_eq!(format!("{dry:#}"), rule);
        let refused = work.reconcile(&difference, &mut FreshStart).await.expect_err("nested");
        assert_eq!(format!("{refused:#}"), rule);
        let group = registry.groups.get("g").expect("listed");
        assert_eq!(group.settings().latency.target, None);
    });
}

#[test]
fn a_step_that_fails_rolls_back_those_before() {
    on_simulation(async |registry| {
        let before = plan(DISKS);
        start(&registry, &before).await;
        // Another disk takes the name while images are opened.
        let after = plan(&format!("{DISKS}[group.h]\niops-total = 9\n[disk.c]\nimage = \"memory:1M\"\n"));
        let difference = PlanDifference::between(&registry, Some(&before), &after).await.expect("possible");
        let mut work = work(ReconcileReason::Reload, &registry, &after);
        let images = work.open(&difference, &FreshStart).await.expect("memory");
        let taken = plan("[disk.c]\nimage = \"memory:4M\"\n");
        start(&registry, &taken).await;
        let refused = work.apply(&difference, images, &mut FreshStart).await.expect_err("the name is in use");
        assert!(refused.to_string().contains("has this name already"), "{refused}");
        work.roll_back().await;
        let disks = ["a", "b", "c"].map(str::to_owned).to_vec();
        assert_eq!(names(&registry), (disks, vec!["g".to_owned()]));
        assert_eq!(registry.disks.get("c").expect("the other").disk.size_bytes(), 4 << 20);
    });
}

#[test]
fn late_disks_are_a_separate_difference() {
    on_simulation(async |registry| {
        let plan = plan(DISKS);
        let is_late = |disk: &settings::DiskWithOrigins| disk.name == "a";
        let (first, late) = PlanDifference::from_empty(&registry, &plan, is_late).await.expect("new names");
        assert_eq!((first.new_disks, late.new_disks), (vec![1], vec![0]));
        assert_eq!((first.new_groups, late.new_groups), (vec![0], Vec::new()));
    });
}

#[test]
fn a_retry_lists_one_disk_of_the_plan() {
    on_simulation(async |registry| {
        start(&registry, &plan("[group.g]\niops-total = 1000\n[disk.b]\nimage = \"memory:2M\"\n")).await;
        let plan = plan(DISKS);
        let difference = PlanDifference::of_disk(&plan, "a");
        let image = open_raw("memory:1M", OpenOptions::default()).expect("a mebibyte of memory");
        let mut work = work(ReconcileReason::Retry, &registry, &plan);
        work.apply(&difference, vec![(0, image)], &mut FreshStart).await.expect("all else is there");
        assert_eq!(names(&registry).0, ["a", "b"]);
    });
}

#[test]
fn check_reports_the_error_of_a_start() {
    on_simulation(async |registry| {
        let plan = plan("[disk.a]\nimage = \"/nowhere/a.raw\"\nformat = \"raw\"\n");
        let (difference, _) =
            PlanDifference::from_empty(&registry, &plan, |_| false).await.expect("new names");
        let mut checking = work(ReconcileReason::Start, &registry, &plan);
        let checked = checking.check_images(&difference, AddressConflictRule::Rejected);
        let (unavailable, found) = checked.await.expect("no groups");
        let found: Vec<_> = found.iter().map(|error| format!("{error:#}")).collect();
        let started = work(ReconcileReason::Start, &registry, &plan).open(&difference, &FreshStart).await;
        let started = format!("{:#}", started.map(drop).expect_err("there is no such file"));
        assert_eq!((unavailable.len(), found), (0, vec![started.clone()]));
        assert!(started.starts_with("weir.toml:4: disk.a.image"), "{started}");
    });
}

/// Lets the registry open sockets of exports, of which `inherited` were passed.
fn with_endpoints(registry: &Registry, inherited: InheritedSockets) {
    // The simulated reactor accepts no clients at sockets of the kernel.
    registry.delay_clients();
    registry.exports.set_endpoint_parameters(
        &Rc::default(),
        &SocketAccess::default(),
        NbdServerTerms::default(),
        inherited,
        &TlsConfig::Off,
    );
}

#[test]
fn a_changed_export_keeps_its_passed_socket() {
    let directory = tempfile::tempdir().expect("a directory");
    let missing = directory.path().join("missing/socket").display().to_string();
    let passed = UnixListener::bind(directory.path().join("passed")).expect("a free path");
    on_simulation(async move |registry| {
        let mut inherited = InheritedSockets::empty();
        inherited.add("vm", passed.into());
        with_endpoints(&registry, inherited);
        let with_queues = |queues: u16, more: &str| {
            plan_of_file(&format!(
                "[disk.a]\nimage = \"memory:1M\"\nexport = [{{ type = \"vhost-user-blk\", \
                 listen = \"fd:vm\", queues = {queues} }}{more}]\n"
            ))
        };
        let queues = |registry: &Registry| {
            let exports = registry.exports.all();
            let config = exports.first().and_then(|export| export.endpoint_config.clone());
            match config {
                Some(ExportTarget::VhostUserBlk(config)) if exports.len() == 1 => Some(config.queues),
                _ => None,
            }
        };
        let (first, second) = (with_queues(1, ""), with_queues(2, ""));
        start(&registry, &first).await;
        assert_eq!(queues(&registry), Some(1));
        reload(&registry, [&first, &second]).await.expect("its socket is free");
        assert_eq!(queues(&registry), Some(2));
        // The socket goes from the old export to the new one, and back.
        let more = format!(", {{ type = \"vhost-user-blk\", listen = \"unix:{missing}\" }}");
        let third = with_queues(3, &more);
        let difference = PlanDifference::between(&registry, Some(&second), &third).await.expect("possible");
        let mut work = work(ReconcileReason::Reload, &registry, &third);
        let refused = work.reconcile(&difference, &mut FreshStart).await.expect_err("no such directory");
        assert!(format!("{refused:#}").contains("missing"), "{refused:#}");
        assert_eq!(queues(&registry), Some(2));
    });
}

#[test]
fn a_roll_back_keeps_an_export_that_got_the_id_of_an_added_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("socket").display().to_string();
    on_simulation(async move |registry| {
        with_endpoints(&registry, InheritedSockets::empty());
        let plan = plan_of_file(&format!(
            "[disk.a]\nimage = \"memory:1M\"\n\
             export = [{{ type = \"vhost-user-blk\", listen = \"unix:{socket}\" }}]\n"
        ));
        let difference = PlanDifference::of_all(&plan);
        let mut work = work(ReconcileReason::Reload, &registry, &plan);
        let images = work.open(&difference, &FreshStart).await.expect("memory");
        work.apply(&difference, images, &mut FreshStart).await.expect("a new name");
        registry.begin_removal("a", Removal::Hard).expect("it was added").await;
        registry.add_disk(RunningDisk::in_memory("b", None)).expect("a new name");
        let other = registry.disks.get("b").expect("listed");
        let target = &plan.exports[0].target;
        registry.add_endpoint("a".to_owned(), other, false, target, None).await.expect("a free id");
        assert!(work.roll_back().await.is_none());
        let left = registry.exports.get("a").expect("of the other disk");
        assert!(&**left.disk.disk.name() == "b" && !left.is_ending());
        assert!(registry.disks.get("a").is_err());
    });
}

#[test]
fn the_cluster_confirms_reservations_before_exports_are_added() {
    let directory = tempfile::tempdir().expect("a directory");
    let state = directory.path().display().to_string();
    let limits = json!({ "number": 1, "nonce": 1, "limits": { "iops-total": 1000 }, "hosts": 2 });
    let stored = json!({ "version": 1, "groups": { "gold": limits } });
    fs::create_dir(directory.path().join("cluster")).expect("a new directory");
    fs::write(directory.path().join("cluster/lab.json"), stored.to_string()).expect("a new file");
    on_simulation(async move |registry| {
        with_endpoints(&registry, InheritedSockets::empty());
        // No etcd listens there, so the stored limits hold.
        let plan = plan_of_file(&format!(
            "[daemon]\nstate = \"{state}\"\n[cluster]\nname = \"lab\"\nhost = \"a\"\n\
             etcd = \"http://127.0.0.1:1\"\n[group.gold]\ncluster = true\n"
        ));
        let cluster = ClusterMembership::prepare(&plan).await.expect("stored limits");
        registry.set_cluster(cluster.expect("it is configured"));
        start(&registry, &plan).await;
        let at_listing = Rc::new(Cell::new(None));
        let (listener, seen) = (Rc::downgrade(&registry), Rc::clone(&at_listing));
        registry.listen(move |change| {
            let (RegistryChange::Listed { .. }, Some(registry)) = (change, listener.upgrade()) else {
                return;
            };
            let seen = Rc::clone(&seen);
            // Runs once the addition waits.
            reactor::spawn(async move {
                reactor::yield_now().await;
                seen.set(seen.get().or(Some(registry.exports.all().len())));
            });
        });
        let keys = json!({ "image": "null:1M", "format": "raw", "group": "gold", "iops-reservation": 10 });
        let export = json!({ "type": "vhost-user-blk", "listen": format!("unix:{state}/socket") });
        let (name, keys) = ("d".to_owned(), keys.as_object().expect("keys").clone());
        let new = NewDisk { name, keys, exports: Some(vec![export]), sockets: Vec::new() };
        // The agent does not run: its answer is awaited until the time limit.
        new.add(&registry).await.expect("the agent refuses nothing");
        assert_eq!((at_listing.get(), registry.exports.all().len()), (Some(0), 1));
    });
}
