//! Opening an export: resolves the URI's server, connects, and checks the properties of the export.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use policy::time::{Duration, Instant};

use super::{
    NbdStorage,
    link::{CONNECT_TIMEOUT, FIRST_PAUSE, LinkConfig, MAX_PAUSE, NbdDialer, NbdLink},
};
use nbd::{
    client::{HandshakeOptions, NbdAddress, NbdConnectError, resolve, with_timeout},
    stream::NbdStream,
    uri::Uri,
};
use reactor::{now, run_blocking, sleep_until, timeout};
use tls::TlsClient;

use crate::{
    CacheMode, OpenError, PassedFiles,
    align::{Align, AlignedDevice as _},
    probe::{HEADER_BYTES, Probed, probe_ends},
};

/// Credentials and addresses of a server from an earlier attempt, because later the process may
/// lack the rights to read them again. Clones share the content.
#[derive(Clone, Debug, Default)]
pub struct ResolvedServerCache(Arc<Mutex<Option<ResolvedServer>>>);

type ResolvedServer = (Option<TlsClient>, Vec<NbdAddress>);

impl ResolvedServerCache {
    fn get(&self) -> Option<ResolvedServer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, found: ResolvedServer) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
    }
}

/// Options of opening an export.
#[derive(Clone, Debug, Default)]
pub struct NbdOptions {
    /// Cache mode: see the table in [`nbd`](super).
    pub cache: CacheMode,
    /// True if the format is given, so that it is not probed.
    pub is_format_known: bool,
    /// Rejects writes.
    pub read_only: bool,
    /// True if another client may write to it.
    pub is_shared: bool,
    /// Accepts an export of size zero.
    pub may_be_empty: bool,
    /// Set if another process may have this export open, for exports that are opened for writing.
    pub passed_files: Option<PassedFiles>,
    /// Time for which requests wait for a disconnected server; with zero they fail at once.
    pub reconnect_delay: Duration,
    /// Time for which the first connection is retried; with zero there is one attempt.
    pub open_timeout: Duration,
    /// Result of an earlier attempt.
    pub server_cache: ResolvedServerCache,
}

/// Opens an export, and probes its format if none was given.
///
/// # Errors
/// The reason, as a message for users.
pub(crate) async fn open(uri: &Uri, options: &NbdOptions) -> Result<(Align<NbdStorage>, Probed), OpenError> {
    let name = uri.to_string();
    let failed = |why: String, remedy: &str| OpenError::new(&name, why, remedy);
    let until = now() + options.open_timeout;
    let cached = options.server_cache.get();
    let find = async {
        let uri_copy = uri.clone();
        let tls = timeout(CONNECT_TIMEOUT, run_blocking(move || uri_copy.credentials()))
            .await
            .map_err(|_| {
                failed("reading its key files timed out".to_owned(), "is their file system available?")
            })?
            .map_err(|error| failed(error.to_string(), "correct the file, or name another in the URI"))?;
        let resolve_once = || {
            let uri_copy = uri.clone();
            with_timeout(CONNECT_TIMEOUT, run_blocking(move || resolve(&uri_copy.server)))
        };
        let until = if cached.is_some() { now() } else { until };
        let addresses =
            retry_until(until, resolve_once).await.map_err(|error| connect_error(&name, &error))?;
        Ok((tls, addresses))
    };
    let (tls, addresses) = find.await.or_else(|error| cached.ok_or(error))?;
    options.server_cache.set((tls.clone(), addresses.clone()));
    let config = LinkConfig {
        name: name.clone(),
        dialler: NbdDialer::Socket(addresses),
        options: HandshakeOptions { export: uri.export.clone(), tls, allocation: true },
        keys: Some(uri.clone()).filter(|uri| uri.tls.is_some()),
        reconnect_delay: options.reconnect_delay,
        read_only: options.read_only,
        flushes: options.cache != CacheMode::Unsafe,
    };
    open_with(config, options, until).await
}

/// Repeats `attempt` until it succeeds, fails for another reason than that the server is
/// unreachable, or `until` has passed; at least once.
async fn retry_until<T, F>(until: Instant, attempt: impl Fn() -> F) -> Result<T, NbdConnectError>
where
    F: Future<Output = Result<T, NbdConnectError>>,
{
    let mut pause = FIRST_PAUSE;
    loop {
        match attempt().await {
            Err(NbdConnectError::Io(_) | NbdConnectError::Disconnected(_) | NbdConnectError::TimedOut(_))
                if now() < until => {}
            outcome => return outcome,
        }
        sleep_until(until.min(now() + pause)).await;
        pause = (2 * pause).min(MAX_PAUSE);
    }
}

async fn open_with(
    config: LinkConfig,
    options: &NbdOptions,
    until: Instant,
) -> Result<(Align<NbdStorage>, Probed), OpenError> {
    let name = config.name.clone();
    let established = retry_until(until, || config.establish()).await;
    let established = established.map_err(|error| {
        let failed = connect_error(&name, &error);
        // A server that disconnects during TLS is reachable and rejects this client: not transient.
        let may_pass = matches!(error, NbdConnectError::Io(_) | NbdConnectError::TimedOut(_));
        if may_pass { failed.transient() } else { failed }
    })?;
    let blocks = established.export().clone();
    if blocks.is_read_only() && !options.read_only {
        let remedy = "make the export writable at its server, or open it for reading only";
        return Err(OpenError::new(&name, "the export is read-only at its server", remedy));
    }
    let size_bytes = blocks.size_bytes & !(u64::from(blocks.minimum_block) - 1);
    if size_bytes == 0 && !options.may_be_empty {
        return Err(OpenError::new(&name, "has size zero", "give it a size at its server"));
    }
    if size_bytes != blocks.size_bytes {
        tracing::warn!(
            nbd = name,
            size_bytes = blocks.size_bytes,
            minimum_block = blocks.minimum_block,
            "the size is not a multiple of the server's minimum block: its last bytes are not served"
        );
    }
    let nbd = NbdStorage {
        link: NbdLink::new(config, established),
        name: name.clone(),
        cache: options.cache,
        read_only: options.read_only,
        is_shared: options.is_shared,
        passed_files: options.passed_files.clone().filter(|_| !options.read_only),
        opened_export: blocks,
    };
    // With an explicit format the bytes need not be readable here.
    let probed = match options.is_format_known {
        true => Probed::Raw,
        false => {
            let unread = |error| {
                let why = format!("its first bytes cannot be read: {error}");
                OpenError::new(&name, why, "check the server")
            };
            let nbd = Align::new(nbd);
            let probed = probe(&nbd).await.map_err(unread)?;
            // The disk may be used by another thread, which then takes the connection over.
            nbd.device().link.release_connection().await;
            return Ok((nbd, probed));
        }
    };
    Ok((Align::new(nbd), probed))
}

async fn probe(nbd: &Align<NbdStorage>) -> reactor::error::Result<Probed> {
    let size = nbd.device().size_bytes();
    let length = size.min(HEADER_BYTES as u64);
    let at = |offset| nbd.read(offset, reactor::buffer::IoBuffer::new(length as usize).into());
    let (first, last) = (at(0).await?.joined(), at(size - length).await?.joined());
    Ok(probe_ends(&first, &last))
}

fn connect_error(name: &str, error: &NbdConnectError) -> OpenError {
    let remedy = match error {
        NbdConnectError::Io(_) | NbdConnectError::NoAddress => "start the server, or check the URI",
        NbdConnectError::TimedOut(_) => "is the server busy, or does it take only one client?",
        NbdConnectError::Refused { .. } => "check the export's name; `nbdinfo --list URI` lists the exports",
        NbdConnectError::ProtocolViolation(_) => "is it an NBD server that listens there?",
        NbdConnectError::Disconnected(_) => {
            "does it require a certificate? tls-certificates=DIR, with client-cert.pem and \
             client-key.pem of an authority that it knows"
        }
        NbdConnectError::Tls(_) => "check scheme, certificates and keys of the URI",
    };
    OpenError::new(name, error.full_message(), remedy)
}

/// Function that opens streams to a server of the simulation.
pub type SimulatedDialer = Box<dyn Fn() -> io::Result<NbdStream> + Send + Sync>;

/// Opens a disk at a server of the simulation, with a given format.
///
/// # Errors
/// As for a real server.
pub async fn simulated(
    make: SimulatedDialer,
    export: &str,
    options: &NbdOptions,
) -> Result<crate::Storage, OpenError> {
    let config = LinkConfig {
        name: format!("simulated:{export}"),
        dialler: NbdDialer::Simulated(make),
        options: HandshakeOptions { export: export.to_owned(), tls: None, allocation: true },
        keys: None,
        reconnect_delay: options.reconnect_delay,
        read_only: options.read_only,
        flushes: options.cache != CacheMode::Unsafe,
    };
    let until = now() + options.open_timeout;
    open_with(config, options, until).await.map(|(nbd, _)| crate::Storage::Nbd(nbd))
}
