//! Volumes with simulated devices, and with processes that are killed between two steps.

use std::{fs, panic, sync::Arc, thread};

use super::*;

/// Devices that record mounts as the kernel would, and fail on request.
#[derive(Clone, Default)]
pub(crate) struct FakeMounter(Arc<Mutex<FakeMounts>>);

#[derive(Default)]
struct FakeMounts {
    mounted: HashSet<PathBuf>,
    attached: usize,
    broken: bool,
}

impl FakeMounter {
    fn set_broken(&self, broken: bool) {
        self.0.lock().unwrap().broken = broken;
    }

    /// Number of calls of `attach`.
    fn attached(&self) -> usize {
        self.0.lock().unwrap().attached
    }

    /// Clears all mounts, like an external `umount` or a reboot.
    fn forget(&self) {
        self.0.lock().unwrap().mounted.clear();
    }
}

impl ImageMounter for FakeMounter {
    fn attach(&self, image: &Path, _: &[String], at: &Path) -> anyhow::Result<()> {
        let mut state = self.0.lock().unwrap();
        if state.broken {
            bail!("no device");
        }
        assert!(image.is_file() && at.is_dir());
        assert!(state.mounted.insert(at.to_owned()), "it is mounted once");
        state.attached += 1;
        Ok(())
    }

    fn detach(&self, at: &Path) -> anyhow::Result<()> {
        let mut state = self.0.lock().unwrap();
        if state.broken {
            bail!("busy");
        }
        assert!(state.mounted.remove(at), "it is mounted");
        Ok(())
    }

    fn is_mounted(&self, at: &Path) -> anyhow::Result<bool> {
        Ok(self.0.lock().unwrap().mounted.contains(at))
    }
}

fn volumes(directory: &Path, devices: &FakeMounter) -> Volumes<FakeMounter> {
    Volumes::new(VolumeStore::open(directory).unwrap(), devices.clone(), Path::new("/nonexistent"))
}

/// An unmounted volume `v`.
fn one() -> (tempfile::TempDir, FakeMounter, Volumes<FakeMounter>) {
    let directory = tempfile::tempdir().unwrap();
    let devices = FakeMounter::default();
    let volumes = volumes(directory.path(), &devices);
    volumes.create(&hold(&volumes, "v"), small()).unwrap();
    (directory, devices, volumes)
}

fn name(text: &str) -> VolumeName {
    VolumeName::read(text).unwrap()
}

fn hold<'a>(volumes: &'a Volumes<FakeMounter>, text: &str) -> VolumeLock<'a> {
    volumes.lock(name(text))
}

/// Options of a volume that can be created without this program.
pub(crate) fn small() -> OptionValues {
    [("size", "8M"), ("format", "raw")].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn users(volumes: &Volumes<FakeMounter>) -> Vec<String> {
    volumes.state(&name("v")).unwrap().unwrap().users.into_iter().collect()
}

#[test]
fn a_volume_is_mounted_once_for_all_and_unmounted_after_the_last() {
    let (_directory, devices, volumes) = one();
    let lock = hold(&volumes, "v");
    let at = volumes.mount(&lock, "a").unwrap();
    assert_eq!(volumes.mount(&lock, "b").unwrap(), at);
    assert_eq!(volumes.mount(&lock, "a").unwrap(), at, "again, as after an answer that was lost");
    assert_eq!((devices.attached(), users(&volumes)), (1, vec!["a".to_owned(), "b".to_owned()]));
    volumes.unmount(&lock, "a").unwrap();
    volumes.unmount(&lock, "a").unwrap();
    assert!(devices.is_mounted(&at).unwrap(), "b has it");
    volumes.unmount(&lock, "b").unwrap();
    assert!(!devices.is_mounted(&at).unwrap());
    volumes.unmount(&lock, "b").unwrap();
    volumes.mount(&lock, "c").unwrap();
    assert_eq!(devices.attached(), 2);
}

#[test]
fn creating_twice_is_idempotent() {
    let (_directory, _, volumes) = one();
    let lock = hold(&volumes, "v");
    volumes.create(&lock, small()).unwrap();
    let mut other = small();
    other.insert("group".to_owned(), "gold".to_owned());
    let error = volumes.create(&lock, other).unwrap_err().to_string();
    assert_eq!(error, "volume v exists with other options (remove it, or choose another name)");
}

#[test]
fn volumes_with_users_are_not_removed() {
    let (_directory, _, volumes) = one();
    let lock = hold(&volumes, "v");
    volumes.mount(&lock, "0123456789abcdef").unwrap();
    assert_eq!(
        volumes.remove(&lock).unwrap_err().to_string(),
        "is mounted: one container is using it (0123456789ab) (stop them first)"
    );
    volumes.unmount(&lock, "0123456789abcdef").unwrap();
    volumes.remove(&lock).unwrap();
    assert_eq!(volumes.state(&name("v")).unwrap(), None);
    assert_eq!(volumes.list().unwrap(), []);
    for error in [
        volumes.remove(&lock).unwrap_err(),
        volumes.mount(&lock, "a").unwrap_err(),
        volumes.unmount(&lock, "a").unwrap_err(),
    ] {
        assert!(error.to_string().starts_with("there is no volume v ("), "{error}");
    }
}

#[test]
fn failures_change_nothing() {
    let (_directory, devices, volumes) = one();
    let lock = hold(&volumes, "v");
    devices.set_broken(true);
    assert_eq!(volumes.mount(&lock, "a").unwrap_err().to_string(), "no device");
    assert_eq!(users(&volumes), Vec::<String>::new());
    devices.set_broken(false);
    volumes.mount(&lock, "a").unwrap();
    devices.set_broken(true);
    assert_eq!(volumes.unmount(&lock, "a").unwrap_err().to_string(), "busy");
    assert_eq!(users(&volumes), ["a"], "it has the volume until that is unmounted");
    devices.set_broken(false);
    volumes.unmount(&lock, "a").unwrap();
}

#[test]
fn failed_image_creation_leaves_no_files() {
    let (directory, _, volumes) = one();
    // Converting to qcow2 needs the program, which is missing here.
    let given: OptionValues = [("size".to_owned(), "8M".to_owned())].into();
    let error = format!("{:#}", volumes.create(&hold(&volumes, "w"), given).unwrap_err());
    assert_eq!(error, "/nonexistent: is not installed");
    assert!(!directory.path().join("w").exists());
    volumes.create(&hold(&volumes, "w"), small()).unwrap();
}

#[test]
fn users_of_unmounted_volumes_are_dropped() {
    let (directory, devices, volumes) = one();
    volumes.mount(&hold(&volumes, "v"), "a").unwrap();
    drop(volumes);
    devices.forget();
    let volumes = self::volumes(directory.path(), &devices);
    volumes.recover().unwrap();
    assert_eq!(users(&volumes), Vec::<String>::new());
    volumes.mount(&hold(&volumes, "v"), "b").unwrap();
    assert_eq!(users(&volumes), ["b"]);
    // Also without a restart in between.
    devices.forget();
    volumes.remove(&hold(&volumes, "v")).unwrap();
}

#[test]
fn mounts_survive_a_restart() {
    let (directory, devices, volumes) = one();
    let at = volumes.mount(&hold(&volumes, "v"), "a").unwrap();
    drop(volumes);
    let volumes = self::volumes(directory.path(), &devices);
    volumes.recover().unwrap();
    assert!(devices.is_mounted(&at).unwrap());
    assert_eq!((users(&volumes), devices.attached()), (vec!["a".to_owned()], 1));
    volumes.unmount(&hold(&volumes, "v"), "a").unwrap();
    assert!(!devices.is_mounted(&at).unwrap());
}

/// The plugin was killed between the mount and the write of the record.
#[test]
fn recovery_undoes_mounts_without_users() {
    let (directory, devices, volumes) = one();
    let image = volumes.state(&name("v")).unwrap().unwrap().image;
    let at = image.with_file_name("mount");
    devices.attach(&image, &[], &at).unwrap();
    drop(volumes);
    let volumes = self::volumes(directory.path(), &devices);
    volumes.recover().unwrap();
    assert!(!devices.is_mounted(&at).unwrap());
    // `weir attach` may outlive the killed plugin and mount after the recovery.
    devices.attach(&image, &[], &at).unwrap();
    assert_eq!(volumes.mount(&hold(&volumes, "v"), "a").unwrap(), at);
    volumes.unmount(&hold(&volumes, "v"), "a").unwrap();
    devices.attach(&image, &[], &at).unwrap();
    volumes.remove(&hold(&volumes, "v")).unwrap();
    assert!(!devices.is_mounted(&at).unwrap());
}

#[test]
fn recovery_removes_leftovers() {
    let (directory, devices, volumes) = one();
    let at = directory.path().join("v");
    fs::remove_file(at.join("volume.json")).unwrap();
    volumes.create(&hold(&volumes, "v"), small()).unwrap();
    fs::remove_file(at.join("volume.json")).unwrap();
    drop(volumes);
    self::volumes(directory.path(), &devices).recover().unwrap();
    assert!(!at.exists());
}

#[test]
fn a_broken_record_hides_no_other_volume() {
    let (directory, _, volumes) = one();
    fs::create_dir(directory.path().join("w")).unwrap();
    fs::write(directory.path().join("w/volume.json"), "{").unwrap();
    volumes.recover().unwrap();
    let names: Vec<_> = volumes.list().unwrap().iter().map(|volume| volume.name.to_string()).collect();
    assert_eq!(names, ["v"]);
    assert!(directory.path().join("w/volume.json").exists(), "another process owns it");
}

#[test]
fn user_ids_are_bounded() {
    let (_directory, _, volumes) = one();
    let lock = hold(&volumes, "v");
    assert!(volumes.mount(&lock, "").unwrap_err().to_string().starts_with("ID: is empty"));
    let long = "x".repeat(MAX_USER_BYTES + 1);
    assert!(volumes.mount(&lock, &long).unwrap_err().to_string().starts_with("ID: is 257 bytes long"));
    let record = VolumeRecord { options: small(), users: (0..MAX_USERS).map(|id| id.to_string()).collect() };
    volumes.mount(&lock, "0").unwrap();
    volumes.store.write(&lock.name, &record).unwrap();
    volumes.mount(&lock, "0").unwrap();
    let error = volumes.mount(&lock, "one more").unwrap_err().to_string();
    assert_eq!(error, "has 1000 users, the maximum (unmount some)");
}

#[test]
fn concurrent_mounts_mount_once() {
    let (_directory, devices, volumes) = one();
    thread::scope(|scope| {
        for user in 0..16 {
            let volumes = &volumes;
            scope.spawn(move || {
                for _ in 0..20 {
                    let user = user.to_string();
                    let at = volumes.mount(&hold(volumes, "v"), &user).unwrap();
                    assert!(volumes.devices.is_mounted(&at).unwrap());
                    volumes.unmount(&hold(volumes, "v"), &user).unwrap();
                }
            });
        }
    });
    assert_eq!(users(&volumes), Vec::<String>::new());
    assert!(devices.0.lock().unwrap().mounted.is_empty());
}

#[test]
fn a_panic_releases_the_lock() {
    let (_directory, _, volumes) = one();
    let panicked = panic::catch_unwind(panic::AssertUnwindSafe(|| {
        let _held = hold(&volumes, "v");
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    volumes.mount(&hold(&volumes, "v"), "a").unwrap();
}
