//! Connections between hosts: one in each direction for each pair.
//!
//! ```text
//!   host1  PeerLink of host2 ──greeting, messages──►  PeerListener  host2
//!   host1  PeerListener      ◄──greeting, messages──  PeerLink of host1
//! ```
//!
//! A message may be lost: with a full queue, or with its connection. Everything is bounded: the
//! number of connections, the length of a line, the time for a handshake, and the time that
//! unacknowledged bytes wait.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener as BoundListener},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use async_channel::{Receiver, Sender};
use rustix::net::sockopt;
use tls::TlsServer;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::AbortHandle,
};
use tokio_openssl::SslStream;

use crate::{
    etcd::EtcdParameters,
    messages::AgentInput,
    peer_message::{MAX_GREETING_BYTES, MAX_MESSAGE_BYTES, PeerGreeting, PeerMessage, VERSION, line},
};

/// Time for a connection, its handshake or a write. Also that after which unacknowledged bytes end
/// a connection.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between messages on an idle connection: its end is then noticed.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Messages that wait for a connection. More are lost.
const QUEUE_LENGTH: usize = 64;
/// First and last pause between attempts to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// Messages of other hosts that wait in the agent's queue: they leave room for those of this host.
/// Connections take turns.
const MAX_QUEUED: usize = 128;
/// Maximum number of connections that were accepted.
const MAX_CONNECTIONS: usize = 2 * policy::cluster::MAX_AGREEING_HOSTS;

/// Binds the address of this host. A new run of the daemon binds it while the old one still has
/// it.
pub(super) fn bind(address: SocketAddr) -> io::Result<BoundListener> {
    let family = match address {
        SocketAddr::V4(_) => rustix::net::AddressFamily::INET,
        SocketAddr::V6(_) => rustix::net::AddressFamily::INET6,
    };
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, rustix::net::SocketType::STREAM, flags, None)
        .map_err(io::Error::from)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, 128)?;
    Ok(BoundListener::from(socket))
}

trait PeerStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> PeerStream for S {}

/// Names of this host and its cluster, and the credentials.
#[derive(Clone, Debug)]
pub(super) struct LinkContext {
    pub(super) cluster: String,
    pub(super) host: String,
    pub(super) terms: EtcdParameters,
}

/// Outgoing connection to one host; ends when dropped.
#[derive(Debug)]
pub(super) struct PeerLink {
    pub(super) address: SocketAddr,
    queue: Sender<Vec<u8>>,
    is_connected: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Drop for PeerLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PeerLink {
    pub(super) fn new(context: LinkContext, to: String, address: SocketAddr) -> Self {
        let (queue, messages) = async_channel::bounded(QUEUE_LENGTH);
        let is_connected = Arc::new(AtomicBool::new(false));
        let run = run_link(context, to, address, messages, Arc::clone(&is_connected));
        Self { address, queue, is_connected, task: tokio::spawn(run).abort_handle() }
    }

    pub(super) fn send(&self, message: &PeerMessage) {
        // Full: the message is lost, as with the connection.
        let _ = self.queue.try_send(message.line());
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }
}

async fn run_link(
    context: LinkContext,
    to: String,
    address: SocketAddr,
    messages: Receiver<Vec<u8>>,
    is_connected: Arc<AtomicBool>,
) {
    let mut pause = FIRST_PAUSE;
    loop {
        if let Ok(Ok(mut stream)) = tokio::time::timeout(TIMEOUT, open(&context, &to, address)).await {
            is_connected.store(true, Ordering::Relaxed);
            pause = FIRST_PAUSE;
            // What waited for the connection is out of date.
            while messages.try_recv().is_ok() {}
            loop {
                let bytes = match tokio::time::timeout(PING_INTERVAL, messages.recv()).await {
                    Ok(Ok(bytes)) => bytes,
                    Ok(Err(_)) => return,
                    Err(_) => PeerMessage::Ping.line(),
                };
                if !matches!(tokio::time::timeout(TIMEOUT, stream.write_all(&bytes)).await, Ok(Ok(()))) {
                    break;
                }
            }
            is_connected.store(false, Ordering::Relaxed);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Options of a socket: its end is noticed soon. Best effort.
fn set_options(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_tcp_user_timeout(stream, TIMEOUT.as_millis() as u32);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, TIMEOUT);
    let _ = sockopt::set_tcp_keepintvl(stream, TIMEOUT / 2);
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
}

async fn open(context: &LinkContext, to: &str, address: SocketAddr) -> anyhow::Result<Box<dyn PeerStream>> {
    let stream = TcpStream::connect(address).await?;
    set_options(&stream);
    let mut stream: Box<dyn PeerStream> = match context.terms.peer_client() {
        None => Box::new(stream),
        Some(connector) => {
            let session = connector.configure()?.into_ssl(&address.ip().to_string())?;
            let mut stream = SslStream::new(session, stream)?;
            Pin::new(&mut stream).connect().await?;
            Box::new(stream)
        }
    };
    let greeting = PeerGreeting {
        version: VERSION,
        cluster: context.cluster.clone(),
        from: context.host.clone(),
        to: to.to_owned(),
    };
    stream.write_all(&line(&greeting)).await?;
    Ok(stream)
}

/// Accepts connections of other hosts, and forwards their messages, until it is dropped.
#[derive(Debug)]
pub(super) struct PeerListener {
    task: AbortHandle,
    connections: Connections,
}

/// For each host the task of its latest connection.
type Connections = Arc<Mutex<BTreeMap<String, AbortHandle>>>;

impl Drop for PeerListener {
    fn drop(&mut self) {
        self.task.abort();
        let connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.values().for_each(AbortHandle::abort);
    }
}

impl PeerListener {
    pub(super) fn new(
        context: LinkContext,
        listener: BoundListener,
        inbox: Sender<AgentInput>,
    ) -> io::Result<Self> {
        let listener = TcpListener::from_std(listener)?;
        let connections = Connections::default();
        let task = tokio::spawn(accept(context, listener, inbox, Arc::clone(&connections))).abort_handle();
        Ok(Self { task, connections })
    }
}

async fn accept(
    context: LinkContext,
    listener: TcpListener,
    inbox: Sender<AgentInput>,
    connections: Connections,
) {
    let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let inbox = PeerInbox { inputs: inbox, queue: Arc::new(Semaphore::new(MAX_QUEUED)) };
    loop {
        let Ok(permit) = Arc::clone(&limit).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (context, inbox, connections) =
                    (context.clone(), inbox.clone(), Arc::clone(&connections));
                tokio::spawn(async move {
                    let _permit = permit;
                    if let Err(error) = serve(&context, stream, inbox, &connections).await {
                        tracing::debug!("cluster: a connection of another host ended: {error:#}");
                    }
                });
            }
            // Out of descriptors, for example.
            Err(_) => tokio::time::sleep(FIRST_PAUSE).await,
        }
    }
}

/// Inbox of the agent, with the number of messages of other hosts that may wait in it.
#[derive(Clone)]
struct PeerInbox {
    inputs: Sender<AgentInput>,
    queue: Arc<Semaphore>,
}

async fn serve(
    context: &LinkContext,
    stream: TcpStream,
    inbox: PeerInbox,
    connections: &Connections,
) -> anyhow::Result<()> {
    set_options(&stream);
    let greeted = tokio::time::timeout(TIMEOUT, greet(context, stream));
    let (mut reader, from) = greeted.await.map_err(|_| anyhow!("no greeting in time"))??;
    let PeerInbox { inputs, queue } = inbox;
    let name = from.clone();
    let task = tokio::spawn(async move {
        while let Ok(Some(line)) = reader.line(MAX_MESSAGE_BYTES).await {
            let Some(message) = PeerMessage::parse(&line) else { return };
            if message == PeerMessage::Ping {
                continue;
            }
            let Ok(permit) = Arc::clone(&queue).acquire_owned().await else { return };
            let input = AgentInput::Peer(from.clone(), Box::new(message), permit);
            if inputs.send(input).await.is_err() {
                return;
            }
        }
    });
    {
        let mut connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|_, task| !task.is_finished());
        ensure!(connections.len() < MAX_CONNECTIONS, "too many hosts are connected");
        // A host has one connection: an earlier one is broken.
        if let Some(earlier) = connections.insert(name, task.abort_handle()) {
            earlier.abort();
        }
    }
    let _ = task.await;
    Ok(())
}

/// Performs the handshake and reads the greeting.
async fn greet(context: &LinkContext, stream: TcpStream) -> anyhow::Result<(LineReader, String)> {
    let stream: Box<dyn PeerStream> = match context.terms.peer_server() {
        None => Box::new(stream),
        Some(server) => Box::new(accept_tls(&server, stream).await?),
    };
    let mut reader = LineReader { stream, bytes: Vec::new() };
    let line = reader.line(MAX_GREETING_BYTES).await?.context("it ended before its greeting")?;
    let greeting: PeerGreeting = serde_json::from_slice(&line).context("its greeting")?;
    ensure!(greeting.version == VERSION, "it has version {}, not {VERSION}", greeting.version);
    ensure!(
        greeting.cluster == context.cluster && greeting.to == context.host,
        "it expects host {:?} of cluster {:?}",
        greeting.to,
        greeting.cluster
    );
    let name = settings::parse_cluster_name(&greeting.from).map_err(|rule| anyhow!("its name {rule}"))?;
    ensure!(name != context.host, "it has the name of this host");
    Ok((reader, name))
}

async fn accept_tls(server: &TlsServer, stream: TcpStream) -> anyhow::Result<SslStream<TcpStream>> {
    let mut stream = SslStream::new(server.ssl()?, stream)?;
    Pin::new(&mut stream).accept().await?;
    Ok(stream)
}

/// Reads lines of bounded length.
struct LineReader {
    stream: Box<dyn PeerStream>,
    bytes: Vec<u8>,
}

impl LineReader {
    /// The next line without its end; `None` at the end of the stream.
    async fn line(&mut self, max: usize) -> anyhow::Result<Option<Vec<u8>>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.bytes[searched..].iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.bytes.drain(..=searched + end).collect();
                line.pop();
                return Ok(Some(line));
            }
            searched = self.bytes.len();
            ensure!(searched <= max, "a line is longer than {max} bytes");
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk).await? {
                0 => return Ok(None),
                count => self.bytes.extend_from_slice(&chunk[..count]),
            }
        }
    }
}
