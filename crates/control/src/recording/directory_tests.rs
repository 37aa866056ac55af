//! Files of a permanent recording: their creation and removal.

use std::time::Duration;

use block::recorder::DiskOperation;
use policy::time::Instant;
use tempfile::TempDir;

use super::*;

struct World {
    place: TempDir,
    directory: Directory,
    named: Named,
    limits: LimitsByOwner,
}

impl World {
    fn new(place: TempDir) -> Self {
        let record =
            RecordingConfig { keep: Duration::from_secs(7200), limit: 16 << 20, ..RecordingConfig::new(place.path().into()) };
        let (directory, named) = (Directory::new(record), Named::alone(0, "vm1"));
        Self { directory, place, named, limits: LimitsByOwner::new() }
    }

    fn ask(&mut self, requests: u64) {
        for _ in 0..requests {
            self.directory.take(&read(), &self.named, &self.limits);
        }
        self.directory.turn(0);
    }

    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.place.path()).unwrap();
        let mut names: Vec<_> = names.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Numbers of recorded and dropped requests.
    fn told(&self) -> (u64, u64) {
        (self.directory.progress.requests(), self.directory.progress.lost())
    }
}

fn read() -> RequestRecord {
    let now = Instant::ZERO;
    RequestRecord {
        disk: 0,
        operation: DiskOperation::Read,
        offset: 0,
        length: 4096,
        requests: 1,
        has_failed: false,
        arrived: now,
        admitted: now,
        throttle_cause: None,
        ended: now,
    }
}

fn place() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn names_are_in_the_order_of_time_and_nobody_else_s() {
    let at = |seconds: u64| name(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 7));
    assert_eq!(at(1_763_949_600), "2025-11-24T02-00-00.007Z.recording");
    assert!(at(9) < at(10) && is_ours(&at(10)));
    for other in ["day.recording", "2025-11-24T02-00-00.007Z.csv", "2025-11-24T02-00-0x.007Z.recording"] {
        assert!(!is_ours(other), "{other}");
    }
}

#[test]
fn the_oldest_go_and_what_is_not_ours_stays() {
    let place = place();
    let now = SystemTime::now();
    let make = |name: &str, age_seconds: u64, length: u64| {
        let file = File::create(place.path().join(name)).unwrap();
        file.set_len(length).unwrap();
        file.set_modified(now - Duration::from_secs(age_seconds)).unwrap();
    };
    // Too old; above the limit, as all files may have 14 MiB; and three files that stay.
    make("2025-11-24T02-00-00.000Z.recording", 7300, 1);
    make("2025-11-24T03-00-00.000Z.recording", 7100, 6 << 20);
    make("2025-11-24T04-00-00.000Z.recording", 3600, 6 << 20);
    make("2025-11-24T05-00-00.000Z.recording", 1, 6 << 20);
    make("day.recording", 99999, 99 << 20);
    let others = place.path().join("2020-01-01T00-00-00.000Z.recording");
    fs::create_dir(&others).unwrap();
    let mut world = World::new(place);
    world.directory.turn(0);
    fs::remove_dir(&others).unwrap();
    let left = ["2025-11-24T04-00-00.000Z.recording", "2025-11-24T05-00-00.000Z.recording", "day.recording"];
    assert_eq!(world.files(), left);
}

#[test]
fn of_two_daemons_the_first_alone_removes_and_the_next_follows() {
    let mut first = World::new(place());
    first.ask(1);
    let path = first.place.path().to_owned();
    assert!(!is_free(&path, None).unwrap() && is_free(&path, Some(&path)).unwrap());
    let mut second = Directory::new(first.directory.record.clone());
    let old = path.join("2025-11-24T02-00-00.000Z.recording");
    let make_old = || {
        let file = File::create(&old).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(7300)).unwrap();
    };
    make_old();
    second.turn(0);
    assert!(old.exists() && second.lock.is_none());
    drop(first.directory);
    // The next turn begins an hour, and therefore prunes.
    second.hour -= 1;
    second.turn(0);
    assert!(!old.exists() && !is_free(&path, None).unwrap());
}

#[test]
fn a_clock_that_is_set_makes_nothing_old() {
    let mut world = World::new(place());
    world.ask(5);
    world.directory.hour -= 1;
    world.directory.turn(0);
    let written = world.files();
    assert_eq!(written.len(), 1);
    // As if the clock had been advanced by three days since the file was written.
    let path = world.place.path().join(&written[0]);
    let before = SystemTime::now() - Duration::from_secs(3 * 86400);
    File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
    world.ask(1);
    assert_eq!(world.files().len(), 2);
    // A file that has existed for longer than the limit is removed all the same.
    let name = path.file_name().unwrap();
    world.directory.ended.get_mut(name).unwrap().0 = Duration::from_secs(7201);
    world.directory.prune().unwrap();
    assert!(!path.exists());
    assert_eq!(world.files().len(), 1);
}

#[test]
fn an_hour_has_a_file_once_something_is_asked() {
    let mut world = World::new(place());
    world.directory.turn(0);
    assert_eq!(world.files(), [""; 0]);
    world.ask(5);
    world.ask(5);
    assert_eq!(world.files().len(), 1);
    world.directory.hour -= 1;
    world.directory.turn(0);
    assert!(world.directory.current.is_none());
    world.ask(1);
    world.directory.end();
    world.directory.turn(0);
    assert!(world.directory.has_ended());
    assert_eq!((world.files().len(), world.told()), (2, (11, 0)));
}

#[test]
fn what_cannot_be_written_is_lost_until_it_can() {
    let mut world = World::new(place());
    fs::remove_dir(world.place.path()).unwrap();
    world.ask(3);
    assert_eq!(world.told(), (0, 3));
    fs::create_dir(world.place.path()).unwrap();
    // No attempt until the retry interval has passed.
    world.ask(4);
    assert_eq!((world.told(), world.files().len()), ((0, 7), 0));
    world.directory.stopped.as_mut().unwrap().again = Instant::ZERO;
    world.ask(1);
    // The dropped requests are counted in the file's first block.
    assert_eq!(world.directory.stopped.as_ref().unwrap().lost, 7);
    world.directory.end();
    world.directory.turn(0);
    assert!(world.directory.stopped.is_none());
    assert_eq!((world.told(), world.files().len()), ((1, 7), 1));
}

#[test]
fn a_block_that_did_not_fit_is_removed_again_and_counted() {
    let mut world = World::new(place());
    // The first turn begins an hour.
    world.directory.turn(0);
    world.ask(5);
    let (sink, _) = world.directory.current.as_mut().unwrap();
    sink.cut();
    world.directory.turn(0);
    let path = world.place.path().join(&world.files()[0]);
    let whole = fs::read(&path).unwrap();
    for _ in 0..3 {
        world.directory.take(&read(), &world.named, &LimitsByOwner::new());
    }
    // Half a block is written, then the disk is full.
    world.directory.current.as_mut().unwrap().0.tear();
    assert!(fs::metadata(&path).unwrap().len() > whole.len() as u64);
    world.directory.look(false);
    assert_eq!((fs::read(&path).unwrap(), world.told()), (whole, (5, 3)));
}

#[test]
fn a_file_that_was_taken_away_is_followed_by_another() {
    let mut world = World::new(place());
    world.ask(1);
    let [first] = world.files().try_into().unwrap();
    fs::remove_file(world.place.path().join(&first)).unwrap();
    world.ask(1);
    world.ask(1);
    assert_eq!(world.files().len(), 1, "of the same name, where no millisecond has passed");
    // In a new directory of the same name.
    let (moved, path) = (world.place.path().with_extension("moved"), world.place.path().to_owned());
    fs::rename(&path, &moved).unwrap();
    world.ask(1);
    assert!(!path.exists());
    fs::create_dir(&path).unwrap();
    world.directory.stopped.as_mut().unwrap().again = Instant::ZERO;
    world.ask(1);
    world.ask(1);
    assert_eq!(world.files().len(), 1);
    assert!(world.told().1 > 0, "{:?}", world.told());
    fs::remove_dir_all(moved).unwrap();
}

#[test]
fn a_place_that_cannot_be_is_refused() {
    let place = place();
    File::create(place.path().join("file")).unwrap();
    assert_eq!(check(&place.path().join("file")).unwrap_err().kind(), ErrorKind::NotADirectory);
    assert_eq!(check(&place.path().join("nowhere")).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_file_begins_with_the_limits_in_force_and_ends_those_of_removed_owners() {
    let mut world = World::new(place());
    let group = LimitsInForce::of_group_with;
    for limits in [group("gold", 0), group("silver", 200)] {
        world.limits.insert(limits.key(), limits);
    }
    // Removed and added again, removed for good, and changed: all while no file is open.
    for name in ["silver", "bronze", "gold"] {
        world.directory.limits(&group(name, 0), Instant::ZERO);
    }
    let mut begun = world.directory.first_limits(&world.limits);
    begun.sort_by_key(|limits| limits.key().1);
    assert_eq!(begun, [group("bronze", 0), group("gold", 0), group("silver", 200)]);
    assert!(world.directory.removed.is_empty());
    // Changes reach an open file at once.
    world.directory.take(&read(), &world.named, &world.limits);
    world.directory.limits(&group("silver", 0), Instant::ZERO);
    assert!(world.directory.removed.is_empty());
}
