//! Attempts of code that has taken over a worker in the sandbox: a separate process enters it, and
//! then its worker makes the attempts.

use std::{
    env,
    fs::{self, File, Permissions},
    io,
    net::{TcpListener, TcpStream, UdpSocket},
    os::unix::{
        fs::{OpenOptionsExt as _, PermissionsExt as _},
        net::{UnixDatagram, UnixListener, UnixStream},
    },
    process::Command,
    thread,
};

use nix::{mount::MsFlags, sys::ptrace, unistd};
use reactor::PollingMode;
use settings::ParsedConfig;

use super::*;

const DIRECTORY: &str = "WEIR_TEST_SANDBOX";
/// A disk in a shared directory, and a file beside it.
const SHARED: [&str; 2] = ["WEIR_TEST_SANDBOX_DISK", "WEIR_TEST_SANDBOX_OTHER"];

/// An attempt and its result.
type Tried = (&'static str, io::Result<()>);

#[test]
fn worker_may_serve_and_nothing_else() {
    let directory = tempfile::tempdir().expect("a directory");
    let shared = SHARED.map(|name| (name, tempfile::NamedTempFile::new().expect("a file")));
    passes("tests::inside", |process| {
        process.env(DIRECTORY, directory.path()).envs(shared.iter().map(|(name, file)| (name, file.path())));
    });
}

/// Runs a test in a separate process, because a sandbox cannot be left.
fn passes(test: &str, prepare: impl FnOnce(&mut Command)) {
    let mut process = Command::new(env::current_exe().expect("this program"));
    process.args(["--exact", "--ignored", "--nocapture", test]);
    prepare(&mut process);
    let output = process.output().expect("it runs");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("1 passed"), "{stdout}");
}

#[test]
#[ignore = "the process of the test above"]
fn inside() {
    let directory = PathBuf::from(env::var_os(DIRECTORY).expect("set by the test above"));
    reactor::use_transient_threads();
    let worker = ReactorWorker::start("worker 0", PollingMode::Off).expect("a worker");
    reactor::run(PollingMode::Off, async move {
        let mut config = ParsedConfig::default();
        config.daemon.qmp.push(directory.join("qmp"));
        let plan = DesiredState::without_disks(config).expect("a plan");
        let _listens = UnixListener::bind(directory.join("other")).expect("a socket");
        let workers = [worker];
        let served = ServedResources { images: vec![shared(0)], ..ServedResources::default() };
        enter(&plan, None, &served, &workers).await.expect("it is entered");
        let (sender, receiver) = async_channel::bounded(1);
        workers[0].spawn(move || async move {
            let results = (allowed(&directory).await, refused(&directory));
            sender.send(results).await.expect("it is waited for");
        });
        let (allowed, refused) = receiver.recv().await.expect("it has tried");
        for (operation, result) in allowed {
            assert!(result.is_ok(), "{operation}: {result:?}");
        }
        for (operation, result) in refused {
            let errno = result.as_ref().err().and_then(io::Error::raw_os_error);
            // ENOSYS is from seccomp, EACCES from landlock or file permissions.
            let is_refused = [nix::libc::ENOSYS, nix::libc::EACCES].map(Some).contains(&errno);
            assert!(is_refused, "{operation}: {result:?}");
        }
    })
    .expect("io_uring works on a test machine");
}

#[test]
fn a_daemon_with_a_disk_at_a_server_calls_its_port_and_no_other() {
    passes("tests::inside_with_a_server", |_| {});
}

#[test]
#[ignore = "the process of the test above"]
fn inside_with_a_server() {
    reactor::use_transient_threads();
    let worker = ReactorWorker::start("worker 0", PollingMode::Off).expect("a worker");
    reactor::run(PollingMode::Off, async move {
        let listens = [(); 2].map(|()| TcpListener::bind(("127.0.0.1", 0)).expect("a port"));
        let ports = listens.each_ref().map(|socket| socket.local_addr().expect("it is bound").port());
        let plan = DesiredState::without_disks(ParsedConfig::default()).expect("a plan");
        let uri = Uri::parse(&format!("nbd://127.0.0.1:{}/disk", ports[0])).expect("a URI");
        let served = ServedResources { remotes: vec![uri.clone()], ..ServedResources::default() };
        let workers = [worker];
        let entered = enter(&plan, None, &served, &workers).await.expect("it is entered").expect("it is on");
        let other = Uri::parse(&format!("nbd://127.0.0.1:{}/disk", ports[1])).expect("a URI");
        assert!(entered.check_remote(&uri).is_ok() && entered.check_remote(&other).is_err());
        let (sender, receiver) = async_channel::bounded(1);
        workers[0].spawn(move || async move {
            // As reconnecting does: on a blocking thread.
            let call =
                |port| reactor::run_blocking(move || TcpStream::connect(("127.0.0.1", port)).map(drop));
            let results =
                (call(ports[0]).await, call(ports[1]).await, UdpSocket::bind(("127.0.0.1", 0)).map(drop));
            sender.send(results).await.expect("it is waited for");
        });
        let (allowed, rejected, datagram) = receiver.recv().await.expect("it has tried");
        assert!(allowed.is_ok(), "{allowed:?}");
        assert!(datagram.is_err());
        // Landlock has rules for ports since Linux 6.7.
        if has_rules_for_ports() {
            assert_eq!(rejected.expect_err("another port").raw_os_error(), Some(nix::libc::EACCES));
        }
    })
    .expect("io_uring works on a test machine");
}

fn has_rules_for_ports() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("it is there");
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let modules = fs::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    version >= (6, 7) && modules.contains("landlock")
}

fn shared(index: usize) -> PathBuf {
    PathBuf::from(env::var_os(SHARED[index]).expect("set by the test above"))
}

async fn allowed(directory: &Path) -> Vec<Tried> {
    let path = directory.join("image");
    vec![
        ("make a file where it serves", File::create(&path).map(drop)),
        ("open it", File::options().read(true).write(true).open(&path).map(drop)),
        ("remove it", fs::remove_file(&path)),
        ("listen there", UnixListener::bind(directory.join("new")).map(drop)),
        ("open the disk among others' files", File::options().write(true).open(shared(0)).map(drop)),
        ("look at devices", fs::read_dir("/sys").map(drop)),
        ("look at itself", fs::read("/proc/self/mountinfo").map(drop)),
        ("start a thread", thread::Builder::new().spawn(|| {}).map(drop)),
        ("wait on another", reactor::run_blocking(|| fs::metadata("/").map(drop)).await),
    ]
}

fn refused(directory: &Path) -> Vec<Tried> {
    let outside = env::temp_dir().join(format!("weir-sandbox-{}", std::process::id()));
    let parent = unistd::getppid();
    vec![
        ("read what root keeps", fs::read("/etc/shadow").map(drop)),
        ("read another's memory", File::open(format!("/proc/{parent}/mem")).map(drop)),
        ("write elsewhere", File::create(&outside).map(drop)),
        ("link elsewhere", fs::hard_link(directory.join("other"), &outside)),
        ("open what lies beside a disk", File::open(shared(1)).map(drop)),
        ("remove what lies beside a disk", fs::remove_file(shared(1))),
        ("look what lies beside a disk", fs::read_dir(shared(1).parent().expect("a directory")).map(drop)),
        ("set a mode", fs::set_permissions("/etc/shadow", Permissions::from_mode(0o666))),
        ("call out", TcpStream::connect(("127.0.0.1", 9)).map(drop)),
        ("send out", UdpSocket::bind(("127.0.0.1", 0)).map(drop)),
        ("call a neighbour", UnixStream::connect(directory.join("other")).map(drop)),
        ("send to a neighbour", UnixDatagram::unbound().map(drop)),
        ("send to a neighbour from a pair", UnixDatagram::pair().map(drop)),
        (
            "make what runs as root",
            fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o4755)
                .open(directory.join("program"))
                .map(drop),
        ),
        ("start a program", Command::new("/bin/true").status().map(drop)),
        ("become a program", unistd::execv(c"/bin/true", &[c"true"]).map(drop).map_err(Into::into)),
        ("trace", ptrace::seize(parent, ptrace::Options::empty()).map_err(Into::into)),
        ("signal", nix::sys::signal::kill(parent, None).map_err(Into::into)),
        ("mount", mount().map_err(Into::into)),
        ("become another", unistd::setuid(unistd::getuid()).map_err(Into::into)),
        ("make a ring of its own", io_uring::IoUring::new(1).map(drop)),
        ("change directory's root", unistd::chroot("/").map_err(Into::into)),
    ]
}

fn mount() -> nix::Result<()> {
    nix::mount::mount(None::<&str>, "/mnt", Some("tmpfs"), MsFlags::empty(), None::<&str>)
}
