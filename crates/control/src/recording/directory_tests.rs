//! Files of a permanent recording: their creation and removal.

use std::time::Duration;

use block::recorder::DiskOperation;
use policy::time::Instant;
use tempfile::TempDir;

use super::*;

struct RecordingDirectoryTest {
    place: TempDir,
    directory: RecordingDirectory,
    named: RecordedDiskEntry,
    limits: LimitsByOwner,
}

impl RecordingDirectoryTest {
    fn new(temporary: TempDir) -> Self {
        let record = RecordingConfig {
            keep: Duration::from_secs(7200),
            limit: 16 << 20,
            ..RecordingConfig::new(temporary.path().into())
        };
        let (directory, named) =
            (RecordingDirectory::new(record), RecordedDiskEntry::without_group(0, "vm1"));
        Self { directory, place: temporary, named, limits: LimitsByOwner::new() }
    }

    fn record(&mut self, requests: u64) {
        for _ in 0..requests {
            self.directory.add_request(&read(), &self.named, &self.limits);
        }
        self.directory.write_due(0);
    }

    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.place.path()).unwrap();
        let mut names: Vec<_> = names.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Numbers of recorded and dropped requests.
    fn counts(&self) -> (u64, u64) {
        (self.directory.progress.requests(), self.directory.progress.dropped())
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
        completed: now,
    }
}

fn temporary_directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn file_names_sort_by_time() {
    let at = |seconds: u64| file_name(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 7));
    assert_eq!(at(1_763_949_600), "2025-11-24T02-00-00.007Z.recording");
    assert!(at(9) < at(10) && is_recording_name(&at(10)));
    for other in ["day.recording", "2025-11-24T02-00-00.007Z.csv", "2025-11-24T02-00-0x.007Z.recording"] {
        assert!(!is_recording_name(other), "{other}");
    }
}

#[test]
fn oldest_files_are_removed_and_foreign_files_kept() {
    let directory = temporary_directory();
    let now = SystemTime::now();
    let make = |name: &str, age_seconds: u64, length: u64| {
        let file = File::create(directory.path().join(name)).unwrap();
        file.set_len(length).unwrap();
        file.set_modified(now - Duration::from_secs(age_seconds)).unwrap();
    };
    // Too old; above the limit, as all files may have 14 MiB; and three files that stay.
    make("2025-11-24T02-00-00.000Z.recording", 7300, 1);
    make("2025-11-24T03-00-00.000Z.recording", 7100, 6 << 20);
    make("2025-11-24T04-00-00.000Z.recording", 3600, 6 << 20);
    make("2025-11-24T05-00-00.000Z.recording", 1, 6 << 20);
    make("day.recording", 99999, 99 << 20);
    let foreign = directory.path().join("2020-01-01T00-00-00.000Z.recording");
    fs::create_dir(&foreign).unwrap();
    let mut fixture = RecordingDirectoryTest::new(directory);
    fixture.directory.write_due(0);
    fs::remove_dir(&foreign).unwrap();
    let left = ["2025-11-24T04-00-00.000Z.recording", "2025-11-24T05-00-00.000Z.recording", "day.recording"];
    assert_eq!(fixture.files(), left);
}

#[test]
fn only_the_lock_owner_removes_files() {
    let mut first = RecordingDirectoryTest::new(temporary_directory());
    first.record(1);
    let path = first.place.path().to_owned();
    assert!(!is_free(&path, None).unwrap() && is_free(&path, Some(&path)).unwrap());
    let mut second = RecordingDirectory::new(first.directory.record.clone());
    let old = path.join("2025-11-24T02-00-00.000Z.recording");
    let make_old = || {
        let file = File::create(&old).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(7300)).unwrap();
    };
    make_old();
    second.write_due(0);
    assert!(old.exists() && second.lock.is_none());
    drop(first.directory);
    // The next call of `turn` begins an hour, and therefore prunes.
    second.hour -= 1;
    second.write_due(0);
    assert!(!old.exists() && !is_free(&path, None).unwrap());
}

#[test]
fn setting_the_clock_does_not_age_files() {
    let mut fixture = RecordingDirectoryTest::new(temporary_directory());
    fixture.record(5);
    fixture.directory.hour -= 1;
    fixture.directory.write_due(0);
    let written = fixture.files();
    assert_eq!(written.len(), 1);
    // As if the clock had been advanced by three days since the file was written.
    let path = fixture.place.path().join(&written[0]);
    let before = SystemTime::now() - Duration::from_secs(3 * 86400);
    File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
    fixture.record(1);
    assert_eq!(fixture.files().len(), 2);
    // A file that has existed for longer than the limit is removed all the same.
    let name = path.file_name().unwrap();
    fixture.directory.first_seen.get_mut(name).unwrap().0 = Duration::from_secs(7201);
    fixture.directory.prune().unwrap();
    assert!(!path.exists());
    assert_eq!(fixture.files().len(), 1);
}

#[test]
fn file_of_an_hour_is_created_by_its_first_request() {
    let mut fixture = RecordingDirectoryTest::new(temporary_directory());
    fixture.directory.write_due(0);
    assert_eq!(fixture.files(), [""; 0]);
    fixture.record(5);
    fixture.record(5);
    assert_eq!(fixture.files().len(), 1);
    fixture.directory.hour -= 1;
    fixture.directory.write_due(0);
    assert!(fixture.directory.current.is_none());
    fixture.record(1);
    fixture.directory.end();
    fixture.directory.write_due(0);
    assert!(fixture.directory.has_ended());
    assert_eq!((fixture.files().len(), fixture.counts()), (2, (11, 0)));
}

#[test]
fn unwritable_requests_are_dropped_and_counted() {
    let mut fixture = RecordingDirectoryTest::new(temporary_directory());
    fs::remove_dir(fixture.place.path()).unwrap();
    fixture.record(3);
    assert_eq!(fixture.counts(), (0, 3));
    fs::create_dir(fixture.place.path()).unwrap();
    // No attempt until the retry interval has passed.
    fixture.record(4);
    assert_eq!((fixture.counts(), fixture.files().len()), ((0, 7), 0));
    fixture.directory.stopped.as_mut().unwrap().retry_at = Instant::ZERO;
    fixture.record(1);
    // The dropped requests are counted in the file's first block.
    assert_eq!(fixture.directory.stopped.as_ref().unwrap().lost, 7);
    fixture.directory.end();
    fixture.directory.write_due(0);
    assert!(fixture.directory.stopped.is_none());
    assert_eq!((fixture.counts(), fixture.files().len()), ((1, 7), 1));
}

#[test]
fn partial_block_is_truncated_and_counted() {
    let mut fixture = RecordingDirectoryTest::new(temporary_directory());
    // The first call of `turn` begins an hour.
    fixture.directory.write_due(0);
    fixture.record(5);
    let (sink, _) = fixture.directory.current.as_mut().unwrap();
    sink.encode_block();
    fixture.directory.write_due(0);
    let path = fixture.place.path().join(&fixture.files()[0]);
    let complete = fs::read(&path).unwrap();
    for _ in 0..3 {
        fixture.directory.add_request(&read(), &fixture.named, &LimitsByOwner::new());
    }
    // Half a block is written, then the disk is full.
    fixture.directory.current.as_mut().unwrap().0.write_half_block();
    assert!(fs::metadata(&path).unwrap().len() > complete.len() as u64);
    fixture.directory.handle_turn_result(false);
    assert_eq!((fs::read(&path).unwrap(), fixture.counts()), (complete, (5, 3)));
}

#[test]
fn removed_file_is_replaced() {
    let mut fixture = RecordingDirectoryTest::new(temporary_directory());
    fixture.record(1);
    let [first] = fixture.files().try_into().unwrap();
    fs::remove_file(fixture.place.path().join(&first)).unwrap();
    fixture.record(1);
    fixture.record(1);
    assert_eq!(fixture.files().len(), 1, "of the same name, where no millisecond has passed");
    // In a new directory of the same name.
    let (moved, path) = (fixture.place.path().with_extension("moved"), fixture.place.path().to_owned());
    fs::rename(&path, &moved).unwrap();
    fixture.record(1);
    assert!(!path.exists());
    fs::create_dir(&path).unwrap();
    fixture.directory.stopped.as_mut().unwrap().retry_at = Instant::ZERO;
    fixture.record(1);
    fixture.record(1);
    assert_eq!(fixture.files().len(), 1);
    assert!(fixture.counts().1 > 0, "{:?}", fixture.counts());
    fs::remove_dir_all(moved).unwrap();
}

#[test]
fn unusable_directory_is_rejected() {
    let place = temporary_directory();
    File::create(place.path().join("file")).unwrap();
    assert_eq!(check(&place.path().join("file")).unwrap_err().kind(), ErrorKind::NotADirectory);
    assert_eq!(check(&place.path().join("nowhere")).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_file_begins_with_the_limits_in_force_and_ends_those_of_removed_owners() {
    let mut fixture = RecordingDirectoryTest::new(temporary_directory());
    let group = OwnerLimits::of_group_with;
    for limits in [group("gold", 0), group("silver", 200)] {
        fixture.limits.insert(limits.key(), limits);
    }
    // Removed and added again, removed for good, and changed: all while no file is open.
    for name in ["silver", "bronze", "gold"] {
        fixture.directory.add_limits(&group(name, 0), Instant::ZERO);
    }
    let mut first_limits = fixture.directory.first_limits(&fixture.limits);
    first_limits.sort_by_key(|limits| limits.key().1);
    assert_eq!(first_limits, [group("bronze", 0), group("gold", 0), group("silver", 200)]);
    assert!(fixture.directory.removed.is_empty());
    // Changes reach an open file at once.
    fixture.directory.add_request(&read(), &fixture.named, &fixture.limits);
    fixture.directory.add_limits(&group("silver", 0), Instant::ZERO);
    assert!(fixture.directory.removed.is_empty());
}
