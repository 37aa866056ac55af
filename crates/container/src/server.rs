//! Connections: a bounded number, a thread each, and an end that waits for requests in progress.
//!
//! ```text
//!   a client connects ──► a free slot? ───► thread: read ─► answer ─► send
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
    mounter::ImageMounter,
    plugin_http::{self, PluginRequestError},
    protocol,
    volumes::Volumes,
};

/// Maximum number of connections with a slot: each has a thread and possibly a child process.
const MAX_CONNECTIONS: usize = 32;
/// Maximum number of threads whose connection lost its slot and that have not noticed yet, or that
/// wait for another slot. At this bound no further connection loses its slot.
const MAX_DISPLACED: usize = MAX_CONNECTIONS;
/// Time within which a request has to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that an arriving request keeps its slot while another client waits. Docker sends a request
/// at once.
const MIN_ARRIVAL_TIME: Duration = Duration::from_millis(250);

/// Pause if accept(2) fails for lack of descriptors or memory: the kernel does not notify when
/// they are available again.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// Slots of connections, and the state of the shutdown.
#[derive(Default)]
struct ConnectionGate {
    state: Mutex<PluginConnectionSlots>,
    changed: Condvar,
}

#[derive(Default)]
struct PluginConnectionSlots {
    connections: usize,
    /// Connections whose requests are still arriving, by number, oldest first.
    arriving: BTreeMap<u64, ArrivingRequest>,
    next: u64,
    /// Connections that lost their slots and still have a thread.
    displaced: usize,
    /// Displaced connections whose requests have arrived, by number, in the order in which they
    /// wait for a slot. New connections are served after all of these.
    returning: VecDeque<u64>,
    /// Requests that were read and are not answered yet.
    in_progress: usize,
    is_ending: bool,
}

struct ArrivingRequest {
    since: Instant,
    stream: UnixStream,
}

/// Server of the socket, with its threads.
pub(crate) struct PluginServer {
    gate: Arc<ConnectionGate>,
}

impl PluginServer {
    /// Starts accepting.
    pub(crate) fn start<D: ImageMounter + 'static>(
        listener: UnixListener,
        volumes: Volumes<D>,
    ) -> anyhow::Result<Self> {
        let gate = Arc::<ConnectionGate>::default();
        let (thread_gate, volumes) = (Arc::clone(&gate), Arc::new(volumes));
        let accept = move || {
            loop {
                // A slot is freed only once a client waits.
                let _ = poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
                thread_gate.acquire_slot();
                match listener.accept() {
                    Ok((stream, _)) => serve(stream, &thread_gate, &volumes),
                    Err(error) => {
                        thread_gate.change(|state| state.connections -= 1);
                        if !is_client_error(error.kind()) {
                            tracing::error!(%error, "connections cannot be accepted; retrying");
                            thread::sleep(ACCEPT_RETRY);
                        }
                    }
                }
            }
        };
        thread::Builder::new()
            .name("accept".to_owned())
            .spawn(accept)
            .context("a thread cannot be started")?;
        Ok(Self { gate })
    }

    /// Rejects new requests and waits for those in progress.
    pub(crate) fn end(&self) {
        self.gate.change(|state| state.is_ending = true);
        // Without a timeout: a mount in progress must be recorded.
        drop(self.gate.wait_while(|state| state.in_progress > 0));
    }
}

/// True for errors of a single client, which has already disconnected.
fn is_client_error(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted)
}

impl ConnectionGate {
    fn wait_while(
        &self,
        condition: impl Fn(&PluginConnectionSlots) -> bool,
    ) -> MutexGuard<'_, PluginConnectionSlots> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.wait_while(state, |state| condition(state)).unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut PluginConnectionSlots)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits for a slot for one more connection, and takes it.
    ///
    /// If requests are still arriving, the oldest loses its slot after [`MIN_ARRIVAL_TIME`].
    /// Displaced connections with a complete request have precedence.
    fn acquire_slot(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.connections >= MAX_CONNECTIONS || !state.returning.is_empty() {
            // A returning connection takes the slot first, or no further one may be displaced.
            if state.connections < MAX_CONNECTIONS || state.displaced >= MAX_DISPLACED {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let oldest = state.arriving.first_entry();
            let age = oldest.as_ref().map(|oldest| oldest.get().since.elapsed());
            state = match (oldest, age) {
                (Some(oldest), Some(age)) if age >= MIN_ARRIVAL_TIME => {
                    // The connection's thread reads the end of the stream and then finds its slot
                    // reassigned.
                    let _ = oldest.remove().stream.shutdown(Shutdown::Read);
                    state.connections -= 1;
                    state.displaced += 1;
                    self.changed.notify_all();
                    state
                }
                // Wakes when the oldest may be displaced.
                (_, Some(age)) => {
                    let waited = self.changed.wait_timeout(state, MIN_ARRIVAL_TIME - age);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                (_, None) => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state.connections += 1;
    }

    /// Registers a connection whose request begins to arrive; returns its number.
    fn register_arriving(&self, stream: UnixStream) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let number = state.next;
        state.next += 1;
        state.arriving.insert(number, ArrivingRequest { since: Instant::now(), stream });
        number
    }

    /// Removes a connection whose request has arrived or failed. False if its slot was reassigned.
    fn unregister_arriving(&self, number: u64) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).arriving.remove(&number).is_some()
    }

    /// Waits for a slot for a displaced connection, behind those that already wait.
    fn reacquire_slot(&self, number: u64) {
        self.change(|state| state.returning.push_back(number));
        let mut state = self.wait_while(|state| {
            state.connections >= MAX_CONNECTIONS || state.returning.front() != Some(&number)
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
        state.in_progress += usize::from(!state.is_ending);
        !state.is_ending
    }
}

fn serve<D: ImageMounter + 'static>(
    stream: UnixStream,
    gate: &Arc<ConnectionGate>,
    volumes: &Arc<Volumes<D>>,
) {
    let (thread_gate, volumes) = (Arc::clone(gate), Arc::clone(volumes));
    let number = match stream.try_clone() {
        // A second descriptor, by which another thread can shut the stream down.
        Ok(duplicate) => gate.register_arriving(duplicate),
        Err(error) => {
            tracing::error!(%error, "connection closed: out of file descriptors");
            return gate.change(|state| state.connections -= 1);
        }
    };
    let work = move || {
        if serve_client(stream, number, &thread_gate, &volumes) {
            thread_gate.change(|state| state.connections -= 1);
        }
    };
    if let Err(error) = thread::Builder::new().name("client".to_owned()).spawn(work) {
        tracing::error!(%error, "connection closed: a thread cannot be started");
        // Exactly one of the two counters has this connection.
        let has_slot = gate.unregister_arriving(number);
        gate.change(|state| if has_slot { state.connections -= 1 } else { state.displaced -= 1 });
    }
}

/// Serves one client; false if its slot was reassigned before its request arrived.
fn serve_client<D: ImageMounter>(
    mut stream: UnixStream,
    number: u64,
    gate: &ConnectionGate,
    volumes: &Volumes<D>,
) -> bool {
    let request = plugin_http::read(&mut stream, Instant::now() + REQUEST_TIMEOUT);
    if !gate.unregister_arriving(number) {
        if request.is_err() {
            gate.change(|state| state.displaced -= 1);
            return false;
        }
        // The request was complete, but this thread read it late.
        gate.reacquire_slot(number);
    }
    let send_result = match request {
        Ok(request) => {
            if !gate.begin() {
                return true;
            }
            // Counted as in progress until the response is sent, so that the end waits for it.
            let response = protocol::perform(&request, volumes, &|| is_gone(&stream));
            let sent = response.map(|response| plugin_http::send(&mut stream, &response));
            gate.change(|state| state.in_progress -= 1);
            sent
        }
        Err(PluginRequestError::Rejected(status, message)) => {
            Some(plugin_http::send(&mut stream, &protocol::error_response(status, message)))
        }
        Err(PluginRequestError::Disconnected) => None,
    };
    if let Some(Err(error)) = send_result {
        tracing::info!(%error, "a client did not read its response");
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
    use crate::{volume_store::VolumeStore, volumes::tests::FakeMounter};

    fn start() -> (TempDir, PluginServer) {
        let directory = tempfile::tempdir().unwrap();
        let store = VolumeStore::open(&directory.path().join("volumes")).unwrap();
        let volumes = Volumes::new(store, FakeMounter::default(), Path::new("/nonexistent"));
        let listener = UnixListener::bind(directory.path().join("socket")).unwrap();
        let server = PluginServer::start(listener, volumes).unwrap();
        (directory, server)
    }

    fn connect(directory: &TempDir) -> UnixStream {
        UnixStream::connect(directory.path().join("socket")).unwrap()
    }

    const ACTIVATE: &[u8] = b"POST /Plugin.Activate HTTP/1.1\r\nHost: plugin\r\n\r\n";

    fn ask(mut stream: UnixStream) -> String {
        stream.write_all(ACTIVATE).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    #[test]
    fn a_request_is_answered_and_the_connection_closed() {
        let (directory, _server) = start();
        let response = ask(connect(&directory));
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("Connection: close"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        assert_eq!(body, r#"{"Implements":["VolumeDriver"]}"#);
    }

    #[test]
    fn a_displaced_complete_request_is_answered() {
        let directory = tempfile::tempdir().unwrap();
        let store = VolumeStore::open(&directory.path().join("volumes")).unwrap();
        let volumes = Volumes::new(store, FakeMounter::default(), Path::new("/nonexistent"));
        let gate = ConnectionGate::default();
        let (mut client, served) = UnixStream::pair().unwrap();
        client.write_all(ACTIVATE).unwrap();
        let number = gate.register_arriving(served.try_clone().unwrap());
        gate.change(|state| {
            // Another client waits, and this connection's thread has not run yet.
            let reassigned = state.arriving.remove(&number).unwrap();
            reassigned.stream.shutdown(Shutdown::Read).unwrap();
            state.displaced += 1;
        });
        assert!(serve_client(served, number, &gate, &volumes), "it has a place");
        let mut response = String::new();
        client.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
        assert_eq!(gate.wait_while(|_| false).connections, 1);
    }

    #[test]
    fn displaced_connections_receive_places_in_order_and_before_new_ones() {
        let gate = Arc::<ConnectionGate>::default();
        gate.change(|state| (state.connections, state.displaced) = (MAX_CONNECTIONS, 2));
        let (sender, admitted) = std::sync::mpsc::channel();
        let wait = |name: &'static str, acquire: fn(&ConnectionGate)| {
            let (gate, sender) = (Arc::clone(&gate), sender.clone());
            thread::spawn(move || {
                acquire(&gate);
                sender.send(name).unwrap();
            })
        };
        let mut threads = vec![wait("first", |gate| gate.reacquire_slot(9))];
        drop(gate.wait_while(|state| state.returning.is_empty()));
        threads.push(wait("second", |gate| gate.reacquire_slot(3)));
        drop(gate.wait_while(|state| state.returning.len() < 2));
        threads.push(wait("new", ConnectionGate::acquire_slot));
        for name in ["first", "second", "new"] {
            gate.change(|state| state.connections -= 1);
            assert_eq!(admitted.recv(), Ok(name));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let state = gate.wait_while(|_| false);
        assert_eq!((state.connections, state.displaced), (MAX_CONNECTIONS, 0));
    }

    #[test]
    fn displaced_connections_are_bounded() {
        let gate = Arc::<ConnectionGate>::default();
        let (_client, served) = UnixStream::pair().unwrap();
        let number = gate.register_arriving(served);
        gate.change(|state| {
            (state.connections, state.displaced) = (MAX_CONNECTIONS, MAX_DISPLACED);
            state.arriving.get_mut(&number).unwrap().since -= MIN_ARRIVAL_TIME;
        });
        let waiting = thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.acquire_slot()
        });
        // An answered request frees a slot.
        gate.change(|state| state.connections -= 1);
        waiting.join().unwrap();
        let state = gate.wait_while(|_| false);
        assert_eq!((state.connections, state.displaced), (MAX_CONNECTIONS, MAX_DISPLACED));
        assert!(state.arriving.contains_key(&number));
    }

    #[test]
    fn silent_clients_are_bounded_and_the_next_waits() {
        let (directory, _server) = start();
        let silent_clients: Vec<_> = (0..MAX_CONNECTIONS).map(|_| connect(&directory)).collect();
        let next = connect(&directory);
        drop(silent_clients);
        assert!(ask(next).starts_with("HTTP/1.1 200 OK\r\n"));
    }

    #[test]
    fn incomplete_requests_lose_their_places() {
        let (directory, _server) = start();
        let half: Vec<_> = (0..3 * MAX_CONNECTIONS)
            .map(|_| {
                let mut stream = connect(&directory);
                stream.write_all(&ACTIVATE[..10]).unwrap();
                stream
            })
            .collect();
        assert!(ask(connect(&directory)).starts_with("HTTP/1.1 200 OK\r\n"));
        let mut response = Vec::new();
        let result = (&half[0]).read_to_end(&mut response);
        // No response about a timeout: other clients would have waited for that long.
        assert!(result.is_ok() && response.is_empty(), "{}", String::from_utf8_lossy(&response));
        drop(half);
    }

    #[test]
    fn a_closed_client_differs_from_a_half_closed_one() {
        let (server, client) = UnixStream::pair().unwrap();
        assert!(!is_gone(&server));
        client.shutdown(Shutdown::Write).unwrap();
        assert!(!is_gone(&server), "it waits for its answer");
        drop(client);
        assert!(is_gone(&server));
    }

    #[test]
    fn no_request_begins_after_the_end() {
        let (directory, server) = start();
        let mut early = connect(&directory);
        early.write_all(&ACTIVATE[..10]).unwrap();
        server.end();
        let mut response = String::new();
        early.write_all(&ACTIVATE[10..]).unwrap();
        assert!(early.read_to_string(&mut response).is_ok() && response.is_empty(), "{response}");
    }
}
