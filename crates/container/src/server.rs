//! Connections: a bounded number, a thread each, and an end that waits for requests in progress.
//!
//! ```text
//!   a client connects ──► a free place? ──► thread: read ─► answer ─► send
//!                         │  no: the oldest connection whose request is still arriving is closed;
//!                         │  if all requests have arrived, the client waits in the socket's queue
//!   SIGTERM ──► no new requests ──► requests in progress complete ──► the process ends
//! ```
//!
//! Threads, because a request may wait for minutes for a child process, and there are few requests.
//!
//! A client that sends half a request and stops delays other clients by a fraction of a second, not
//! by the timeout of a request.

use std::{
    collections::{BTreeMap, VecDeque},
    io::ErrorKind,
    net::Shutdown,
    os::{
        fd::AsFd as _,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::{
    device::Devices,
    http::{self, Refusal},
    protocol,
    volumes::Volumes,
};

/// Bound of the connections with a place: each has a thread and possibly a child process.
const MOST_CONNECTIONS: usize = 32;
/// Bound of the threads whose connection lost its place and that have not noticed yet, or that
/// wait for another place. At this bound no further connection loses its place.
const MOST_DISPLACED: usize = MOST_CONNECTIONS;
/// Time within which a request has to arrive.
const REQUEST_TIME: Duration = Duration::from_secs(10);
/// Time that an arriving request keeps its place while another client waits. Docker sends a request
/// at once.
const UNDISTURBED: Duration = Duration::from_millis(250);

/// Pause without descriptors or memory: the kernel does not notify when there are some again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Places of connections, and the state of the shutdown.
#[derive(Default)]
struct Doorkeeper {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    connections: usize,
    /// Connections whose requests are still arriving, by number, oldest first.
    arriving: BTreeMap<u64, ArrivingRequest>,
    next: u64,
    /// Connections that lost their places and still have a thread.
    displaced: usize,
    /// Displaced connections whose requests have arrived, by number, in the order in which they
    /// wait for a place. New connections are served after all of these.
    returning: VecDeque<u64>,
    /// Requests that were read and are not answered yet.
    begun: usize,
    is_ending: bool,
}

struct ArrivingRequest {
    since: Instant,
    stream: UnixStream,
}

/// Server of the socket, with its threads.
pub(crate) struct Server {
    door: Arc<Doorkeeper>,
}

impl Server {
    /// Starts accepting.
    pub(crate) fn start<D: Devices + 'static>(
        listener: UnixListener,
        volumes: Volumes<D>,
    ) -> anyhow::Result<Self> {
        let door = Arc::<Doorkeeper>::default();
        let (keeper, volumes) = (Arc::clone(&door), Arc::new(volumes));
        let accept = move || {
            loop {
                // A place is freed only once a client waits.
                let _ = poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
                keeper.make_room();
                match listener.accept() {
                    Ok((stream, _)) => serve(stream, &keeper, &volumes),
                    Err(error) => {
                        keeper.change(|state| state.connections -= 1);
                        if !passes(error.kind()) {
                            tracing::error!(%error, "connections cannot be accepted; retrying");
                            thread::sleep(TRY_AGAIN);
                        }
                    }
                }
            }
        };
        thread::Builder::new()
            .name("accept".to_owned())
            .spawn(accept)
            .context("a thread cannot be started")?;
        Ok(Self { door })
    }

    /// Rejects new requests and waits for those in progress.
    pub(crate) fn end(&self) {
        self.door.change(|state| state.is_ending = true);
        // Without a timeout: a mount in progress must be recorded.
        drop(self.door.wait_while(|state| state.begun > 0));
    }
}

/// True for errors of a single client, which has already disconnected.
fn passes(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted)
}

impl Doorkeeper {
    fn wait_while(&self, is_so: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.wait_while(state, |state| is_so(state)).unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits for a place for one more connection, and takes it.
    ///
    /// If requests are still arriving, the oldest loses its place after [`UNDISTURBED`]. Displaced
    /// connections with a complete request have precedence.
    fn make_room(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.connections >= MOST_CONNECTIONS || !state.returning.is_empty() {
            // A returning connection takes the place first, or no further one may be displaced.
            if state.connections < MOST_CONNECTIONS || state.displaced >= MOST_DISPLACED {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let oldest = state.arriving.first_entry();
            let age = oldest.as_ref().map(|oldest| oldest.get().since.elapsed());
            state = match (oldest, age) {
                (Some(oldest), Some(age)) if age >= UNDISTURBED => {
                    // The connection's thread reads the end of the stream and then finds its place
                    // reassigned.
                    let _ = oldest.remove().stream.shutdown(Shutdown::Read);
                    state.connections -= 1;
                    state.displaced += 1;
                    self.changed.notify_all();
                    state
                }
                // Wakes when the oldest may be displaced.
                (_, Some(age)) => {
                    let waited = self.changed.wait_timeout(state, UNDISTURBED - age);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                (_, None) => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state.connections += 1;
    }

    /// Registers a connection whose request begins to arrive; returns its number.
    fn arrives(&self, stream: UnixStream) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let number = state.next;
        state.next += 1;
        state.arriving.insert(number, ArrivingRequest { since: Instant::now(), stream });
        number
    }

    /// Removes a connection whose request has arrived or failed. False if its place was reassigned.
    fn has_arrived(&self, number: u64) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).arriving.remove(&number).is_some()
    }

    /// Waits for a place for a displaced connection, behind those that already wait.
    fn take_place(&self, number: u64) {
        self.change(|state| state.returning.push_back(number));
        let mut state = self.wait_while(|state| {
            state.connections >= MOST_CONNECTIONS || state.returning.front() != Some(&number)
        });
        state.returning.pop_front();
        state.displaced -= 1;
        state.connections += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Counts a request as in progress; false after the end was requested.
    fn begin(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.begun += usize::from(!state.is_ending);
        !state.is_ending
    }
}

fn serve<D: Devices + 'static>(stream: UnixStream, door: &Arc<Doorkeeper>, volumes: &Arc<Volumes<D>>) {
    let (keeper, volumes) = (Arc::clone(door), Arc::clone(volumes));
    let number = match stream.try_clone() {
        // A second descriptor, by which another thread can shut the stream down.
        Ok(again) => door.arrives(again),
        Err(error) => {
            tracing::error!(%error, "connection closed: out of file descriptors");
            return door.change(|state| state.connections -= 1);
        }
    };
    let work = move || {
        if one(stream, number, &keeper, &volumes) {
            keeper.change(|state| state.connections -= 1);
        }
    };
    if let Err(error) = thread::Builder::new().name("client".to_owned()).spawn(work) {
        tracing::error!(%error, "connection closed: a thread cannot be started");
        // Exactly one of the two counters has this connection.
        let has_place = door.has_arrived(number);
        door.change(|state| if has_place { state.connections -= 1 } else { state.displaced -= 1 });
    }
}

/// Serves one client; false if its place was reassigned before its request arrived.
fn one<D: Devices>(mut stream: UnixStream, number: u64, door: &Doorkeeper, volumes: &Volumes<D>) -> bool {
    let request = http::read(&mut stream, Instant::now() + REQUEST_TIME);
    if !door.has_arrived(number) {
        if request.is_err() {
            door.change(|state| state.displaced -= 1);
            return false;
        }
        // The request was complete, but this thread read it late.
        door.take_place(number);
    }
    let answer = match request {
        Ok(request) => {
            if !door.begin() {
                return true;
            }
            // Counted as in progress until the response is sent, so that the end waits for it.
            let answer = protocol::answer(&request, volumes, &|| is_gone(&stream));
            let sent = answer.map(|answer| http::send(&mut stream, &answer));
            door.change(|state| state.begun -= 1);
            sent
        }
        Err(Refusal::Answer(status, what)) => Some(http::send(&mut stream, &protocol::refused(status, what))),
        Err(Refusal::Gone) => None,
    };
    if let Some(Err(error)) = answer {
        tracing::info!(%error, "a client has not read its answer");
    }
    true
}

/// True if the client closed its connection. A client that only shut down its sending side has not.
fn is_gone(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream.as_fd(), PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO).is_ok()
        && polled[0]
            .revents()
            .is_some_and(|events| events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        path::Path,
    };

    use tempfile::TempDir;

    use super::*;
    use crate::{record::Store, volumes::tests::Pretended};

    fn start() -> (TempDir, Server) {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("volumes")).unwrap();
        let volumes = Volumes::new(store, Pretended::default(), Path::new("/nonexistent"));
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let server = Server::start(listener, volumes).unwrap();
        (directory, server)
    }

    fn connect(directory: &TempDir) -> UnixStream {
        UnixStream::connect(directory.path().join("socket")).unwrap()
    }

    const ACTIVATE: &[u8] = b"POST /Plugin.Activate HTTP/1.1\r\nHost: plugin\r\n\r\n";

    fn ask(mut stream: UnixStream) -> String {
        stream.write_all(ACTIVATE).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn a_request_is_answered_and_the_connection_closed() {
        let (directory, _server) = start();
        let answer = ask(connect(&directory));
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("Connection: close"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert_eq!(body, r#"{"Implements":["VolumeDriver"]}"#);
    }

    #[test]
    fn a_request_that_is_read_late_keeps_its_turn() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("volumes")).unwrap();
        let volumes = Volumes::new(store, Pretended::default(), Path::new("/nonexistent"));
        let door = Doorkeeper::default();
        let (mut client, served) = UnixStream::pair().unwrap();
        client.write_all(ACTIVATE).unwrap();
        let number = door.arrives(served.try_clone().unwrap());
        door.change(|state| {
            // Another client waits, and this connection's thread has not run yet.
            let reassigned = state.arriving.remove(&number).unwrap();
            reassigned.stream.shutdown(Shutdown::Read).unwrap();
            state.displaced += 1;
        });
        assert!(one(served, number, &door, &volumes), "it has a place");
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert_eq!(door.wait_while(|_| false).connections, 1);
    }

    #[test]
    fn displaced_connections_receive_places_in_order_and_before_new_ones() {
        let door = Arc::<Doorkeeper>::default();
        door.change(|state| (state.connections, state.displaced) = (MOST_CONNECTIONS, 2));
        let (sender, places) = std::sync::mpsc::channel();
        let wait = |name: &'static str, take: fn(&Doorkeeper)| {
            let (door, sender) = (Arc::clone(&door), sender.clone());
            thread::spawn(move || {
                take(&door);
                sender.send(name).unwrap();
            })
        };
        let mut threads = vec![wait("first", |door| door.take_place(9))];
        drop(door.wait_while(|state| state.returning.is_empty()));
        threads.push(wait("second", |door| door.take_place(3)));
        drop(door.wait_while(|state| state.returning.len() < 2));
        threads.push(wait("new", Doorkeeper::make_room));
        for name in ["first", "second", "new"] {
            door.change(|state| state.connections -= 1);
            assert_eq!(places.recv(), Ok(name));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let state = door.wait_while(|_| false);
        assert_eq!((state.connections, state.displaced), (MOST_CONNECTIONS, 0));
    }

    #[test]
    fn displaced_connections_are_bounded() {
        let door = Arc::<Doorkeeper>::default();
        let (_client, served) = UnixStream::pair().unwrap();
        let number = door.arrives(served);
        door.change(|state| {
            (state.connections, state.displaced) = (MOST_CONNECTIONS, MOST_DISPLACED);
            state.arriving.get_mut(&number).unwrap().since -= UNDISTURBED;
        });
        let newcomer = thread::spawn({
            let door = Arc::clone(&door);
            move || door.make_room()
        });
        // An answered request frees a place.
        door.change(|state| state.connections -= 1);
        newcomer.join().unwrap();
        let state = door.wait_while(|_| false);
        assert_eq!((state.connections, state.displaced), (MOST_CONNECTIONS, MOST_DISPLACED));
        assert!(state.arriving.contains_key(&number));
    }

    #[test]
    fn silent_clients_are_bounded_and_the_next_waits() {
        let (directory, _server) = start();
        let silent: Vec<_> = (0..MOST_CONNECTIONS).map(|_| connect(&directory)).collect();
        let next = connect(&directory);
        drop(silent);
        assert!(ask(next).starts_with("HTTP/1.1 200 OK\r\n"));
    }

    #[test]
    fn half_requests_give_their_places_to_clients_that_wait() {
        let (directory, _server) = start();
        let half: Vec<_> = (0..3 * MOST_CONNECTIONS)
            .map(|_| {
                let mut stream = connect(&directory);
                stream.write_all(&ACTIVATE[..10]).unwrap();
                stream
            })
            .collect();
        assert!(ask(connect(&directory)).starts_with("HTTP/1.1 200 OK\r\n"));
        let mut answer = Vec::new();
        let ended = (&half[0]).read_to_end(&mut answer);
        // No response about a timeout: other clients would have waited for that long.
        assert!(ended.is_ok() && answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
        drop(half);
    }

    #[test]
    fn who_is_gone_is_told_from_who_has_said_all() {
        let (mine, theirs) = UnixStream::pair().unwrap();
        assert!(!is_gone(&mine));
        theirs.shutdown(Shutdown::Write).unwrap();
        assert!(!is_gone(&mine), "it waits for its answer");
        drop(theirs);
        assert!(is_gone(&mine));
    }

    #[test]
    fn at_the_end_nothing_begins() {
        let (directory, server) = start();
        let mut early = connect(&directory);
        early.write_all(&ACTIVATE[..10]).unwrap();
        server.end();
        let mut answer = String::new();
        early.write_all(&ACTIVATE[10..]).unwrap();
        assert!(early.read_to_string(&mut answer).is_ok() && answer.is_empty(), "{answer}");
    }
}
