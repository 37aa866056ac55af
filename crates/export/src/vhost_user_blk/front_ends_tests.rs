//! Front ends that connect, stay, disconnect, and compete.

use std::{
    cell::Cell,
    io::{Read as _, Write as _},
    net::Shutdown,
    os::unix::net::{UnixDatagram, UnixListener, UnixStream},
    rc::Rc,
};

use reactor::{PollingMode, Signal, buffer::IoBuffer, sim};

use super::*;

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    reactor::run(PollingMode::Off, future).expect("io_uring works on a test machine")
}

/// Timeout of a wait that must succeed.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves a front end until it hangs up, and then until its rings would have ended.
#[derive(Default)]
struct FrontEndOwner {
    connections: Cell<usize>,
    changed: Signal,
    /// True if rings take time to end.
    slow: Cell<bool>,
    /// True if the served front end has sent something.
    has_sent: Cell<bool>,
    hung_up: Signal,
    ended: Signal,
}

impl FrontEndOwner {
    async fn serve(self: Rc<Self>, socket: Fd) {
        self.connections.set(self.connections.get() + 1);
        self.has_sent.set(false);
        self.changed.raise();
        let mut buffer = IoBuffer::new(1);
        loop {
            let (result, returned) = operation::receive(&socket, buffer, 0).await;
            buffer = returned;
            if !matches!(result, Ok(1..)) {
                break;
            }
            self.has_sent.set(true);
            self.changed.raise();
        }
        if self.slow.get() {
            self.hung_up.raise();
            self.ended.wait().await;
        }
    }

    async fn wait_for_connections(&self, count: usize) {
        self.until("it is not served", || self.connections.get() >= count).await;
    }

    /// Sends a byte and waits until the served front end has sent something.
    async fn send_and_wait(&self, mut socket: &UnixStream) {
        socket.write_all(&[1]).expect("connected");
        self.until("it is not heard", || self.has_sent.get()).await;
    }

    async fn until(&self, why: &str, condition: impl Fn() -> bool) {
        let wait = async {
            while !condition() {
                self.changed.wait().await;
            }
        };
        assert!(reactor::timeout(WAIT_TIMEOUT, wait).await.is_ok(), "{why}");
    }
}

fn spawn(mut front_ends: FrontEnds) -> (Rc<FrontEndOwner>, reactor::JoinHandle<io::Result<()>>) {
    let owner = Rc::<FrontEndOwner>::default();
    let serving = Rc::clone(&owner);
    let task = reactor::spawn_joinable(async move {
        front_ends.serve(|| !serving.has_sent.get(), |socket| Rc::clone(&serving).serve(socket)).await
    });
    (owner, task)
}

/// Longer than a test takes.
const MAX_SILENCE: Duration = Duration::from_secs(3600);

/// A socket at which front ends are served.
struct ListeningFixture {
    owner: Rc<FrontEndOwner>,
    path: PathBuf,
}

impl ListeningFixture {
    /// Runs `test` while front ends are served; one that sends nothing keeps its place for
    /// `silence`.
    fn run(name: &'static str, silence: Duration, test: impl AsyncFnOnce(&Self) + 'static) {
        real(async move {
            let directory = directory(name);
            let path = directory.join("s");
            let listener = UnixListener::bind(&path).expect("a socket");
            let mut front_ends = FrontEnds::listen("e", Fd::from(listener));
            front_ends.silence = silence;
            let (owner, task) = spawn(front_ends);
            test(&Self { owner, path }).await;
            task.cancel().await;
            std::fs::remove_dir_all(directory).expect("removed");
        });
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).expect("it listens")
    }

    /// Gives the server time to reject a front end: a number of round trips to another thread.
    async fn pause(&self) {
        for _ in 0..20 {
            reactor::run_blocking(|| ()).await;
        }
    }
}

/// Fails if the peer has closed.
fn is_served(socket: &UnixStream) {
    socket.set_nonblocking(true).expect("a socket");
    let error = (&*socket).read(&mut [0]).expect_err("it is served");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

/// Waits until the peer closes.
async fn assert_rejected(mut socket: UnixStream) {
    let read = reactor::run_blocking(move || socket.read(&mut [0])).await;
    assert!(matches!(read, Ok(0)), "{read:?}");
}

fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("weir-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir(&path).expect("a directory");
    path
}

#[test]
fn a_front_end_that_connects_shortly_before_a_disconnect_is_served() {
    ListeningFixture::run("early", MAX_SILENCE, async |fixture| {
        let owner = &fixture.owner;
        let first = fixture.connect();
        owner.wait_for_connections(1).await;
        let second = fixture.connect();
        fixture.pause().await;
        drop(first);
        owner.wait_for_connections(2).await;
        is_served(&second);
    });
}

#[test]
fn a_second_front_end_is_rejected_until_the_first_disconnects() {
    ListeningFixture::run("second", MAX_SILENCE, async |fixture| {
        let owner = &fixture.owner;
        let first = fixture.connect();
        owner.wait_for_connections(1).await;
        owner.send_and_wait(&first).await;
        for _ in 0..3 {
            assert_rejected(fixture.connect()).await;
        }
        drop(first);
        let second = fixture.connect();
        owner.wait_for_connections(2).await;
        // A half-closed connection counts as disconnected.
        second.shutdown(Shutdown::Write).expect("connected");
        let _third = fixture.connect();
        owner.wait_for_connections(3).await;
    });
}

#[test]
fn a_silent_front_end_is_replaced_by_the_next() {
    ListeningFixture::run("silent", Duration::ZERO, async |fixture| {
        let owner = &fixture.owner;
        let silent = fixture.connect();
        owner.wait_for_connections(1).await;
        let second = fixture.connect();
        assert_rejected(silent).await;
        owner.wait_for_connections(2).await;
        // A front end that has sent something stays, and later ones are rejected.
        owner.send_and_wait(&second).await;
        assert_rejected(fixture.connect()).await;
        assert_eq!(owner.connections.get(), 2);
    });
}

#[test]
fn a_front_end_that_sends_is_preferred_over_many_silent_ones() {
    ListeningFixture::run("crowd", MAX_SILENCE, async |fixture| {
        let owner = &fixture.owner;
        // More than `MAX_WAITING`, so that the oldest are rejected while the test runs.
        let mut crowd: Vec<_> = (0..100).map(|_| fixture.connect()).collect();
        owner.wait_for_connections(1).await;
        let sender = fixture.connect();
        owner.send_and_wait(&sender).await;
        assert_eq!(owner.connections.get(), 2, "none of the others is served before");
        assert_rejected(crowd.swap_remove(0)).await;
    });
}

#[test]
fn a_disconnected_front_end_replaces_none() {
    ListeningFixture::run("hasty", MAX_SILENCE, async |fixture| {
        let owner = &fixture.owner;
        let silent = fixture.connect();
        owner.wait_for_connections(1).await;
        for _ in 0..3 {
            drop(fixture.connect());
        }
        owner.send_and_wait(&silent).await;
        assert_rejected(fixture.connect()).await;
        assert_eq!(owner.connections.get(), 1);
    });
}

#[test]
fn a_silent_front_end_keeps_its_place_for_the_timeout() {
    ListeningFixture::run("quiet", MAX_SILENCE, async |fixture| {
        let owner = &fixture.owner;
        let silent = fixture.connect();
        owner.wait_for_connections(1).await;
        let second = fixture.connect();
        fixture.pause().await;
        assert_eq!(owner.connections.get(), 1);
        owner.send_and_wait(&silent).await;
        assert_rejected(second).await;
        assert_eq!(owner.connections.get(), 1);
    });
}

#[test]
fn the_next_front_end_waits_until_the_rings_of_the_last_have_ended() {
    ListeningFixture::run("rings", MAX_SILENCE, async |fixture| {
        let owner = &fixture.owner;
        owner.slow.set(true);
        let first = fixture.connect();
        owner.wait_for_connections(1).await;
        drop(first);
        let second = fixture.connect();
        owner.hung_up.wait().await;
        fixture.pause().await;
        assert_eq!(owner.connections.get(), 1);
        owner.ended.raise();
        owner.wait_for_connections(2).await;
        is_served(&second);
    });
}

#[test]
fn listening_front_end_is_reconnected() {
    real(async {
        let directory = directory("calls");
        let path = directory.join("s");
        let (owner, task) = spawn(FrontEnds::call("e", path.clone()));
        // At first no front end listens.
        let accept =
            |listener: UnixListener| reactor::run_blocking(move || listener.accept().map(|_| listener));
        let listener = accept(UnixListener::bind(&path).expect("a socket")).await.expect("it calls");
        owner.wait_for_connections(1).await;
        let listener = accept(listener).await.expect("it calls again");
        owner.wait_for_connections(2).await;
        // The front end restarts.
        drop(listener);
        std::fs::remove_file(&path).expect("removed");
        accept(UnixListener::bind(&path).expect("a socket")).await.expect("it calls the new one");
        owner.wait_for_connections(3).await;
        task.cancel().await;
        std::fs::remove_dir_all(directory).expect("removed");
    });
}

#[test]
fn the_reason_of_a_failed_connect_is_logged() {
    sim::run(1, async {
        let directory = directory("why");
        let path = directory.join("s");
        let mut front_ends = FrontEnds::call("e", path.clone());
        let mut last_message = async || {
            let limit = Duration::from_secs(5);
            assert!(
                reactor::timeout(limit, front_ends.serve(|| false, async |_| {})).await.is_err(),
                "it goes on"
            );
            match &front_ends.source {
                FrontEndSource::Connect { last_logged: message, .. } => message.clone(),
                FrontEndSource::Listen(_) => unreachable!("it calls"),
            }
        };
        assert!(last_message().await.starts_with("No such file"));
        let listener = UnixListener::bind(&path).expect("a socket");
        assert_eq!(last_message().await, "it hung up at once");
        drop(listener);
        assert!(last_message().await.starts_with("Connection refused"));
        std::fs::remove_dir_all(directory).expect("removed");
    });
}

#[test]
fn connecting_is_retried_until_the_socket_type_matches() {
    real(async {
        let directory = directory("kinds");
        let path = directory.join("s");
        let wrong = UnixDatagram::bind(&path).expect("a socket");
        let mut front_ends = FrontEnds::call("e", path.clone());
        {
            let mut next = pin!(front_ends.next());
            let early = reactor::timeout(Duration::from_millis(1), next.as_mut()).await;
            assert!(early.is_err(), "{early:?}");
            drop(wrong);
            std::fs::remove_file(&path).expect("removed");
            let _listener = UnixListener::bind(&path).expect("a socket");
            assert!(matches!(reactor::timeout(WAIT_TIMEOUT, next).await, Ok(Ok(_))), "it calls the new one");
        }
        std::fs::remove_dir_all(directory).expect("removed");
    });
}

#[test]
fn a_path_too_long_for_a_socket_is_an_error() {
    real(async {
        let long = PathBuf::from("x".repeat(200));
        let error = FrontEnds::call("e", long).serve(|| false, async |_| {}).await.expect_err("too long");
        assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
    });
}
