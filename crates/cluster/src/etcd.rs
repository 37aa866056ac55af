//! A client of etcd's JSON gateway (`/v3/…`, HTTP/1.1), as far as a cluster needs it.
//!
//! ```text
//!   EtcdClient ── one member at a time ──► EtcdConnection ── one request, one answer ──►   POST /v3/kv/txn
//!    │                                                                                     POST /v3/lease/…
//!    └── EtcdWatch: a separate connection, a streamed answer ──────────────────────────►   POST /v3/watch
//! ```
//!
//! Why not gRPC: `docs/decisions/0042-etcd-by-its-gateway.md`. Any failure of a member ends the
//! connection; the caller then tries another member. Answers are bounded in length and time.
//!
//! Members' names are resolved once, before the sandbox. Never interprets keys.

mod connection;
mod message;
mod watch;

use std::{
    io::Read as _,
    net::{SocketAddr, ToSocketAddrs as _},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use openssl::ssl::SslConnector;
use reactor::{regular_file, sanitize::sanitize};
use serde_json::{Value, json};
use settings::ClusterConfig;
use tls::TlsServer;
use tokio::task::JoinSet;

use connection::{EtcdConnection, EtcdTls};
pub(super) use message::{EtcdEvent, EtcdKeyValue, EtcdOperation, KeyRange, TransactionCondition};
pub(super) use watch::{EtcdWatch, parse_events};

/// Timeout of a request: less than half a lease, so that another member can be tried.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which the next member is tried in parallel.
const PARALLEL_CONNECT_DELAY: Duration = Duration::from_millis(100);
/// Timeout of a login: etcd hashes passwords slowly by design.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(4);
const AUTHENTICATE: &str = "/v3/auth/authenticate";
/// Operations in a transaction: etcd's default of `--max-txn-ops`.
pub(super) const MAX_OPERATIONS: usize = 128;
/// Bytes in a transaction: well below etcd's default of `--max-request-bytes`.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Largest password in bytes.
const MAX_PASSWORD_BYTES: u64 = 4096;

/// Failure of a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdError {
    /// No answer, or not in time. Another member may answer.
    #[error("{0:#}")]
    Unreachable(anyhow::Error),
    /// The member refuses the request. A retry is useless until an administrator acts.
    #[error("{0}")]
    Refused(String),
}

impl EtcdError {
    fn unreachable(error: impl Into<anyhow::Error>) -> Self {
        Self::Unreachable(error.into())
    }

    /// Error before the first attempt.
    pub(super) fn unknown_member() -> Self {
        Self::Unreachable(anyhow!("etcd: no member is known"))
    }

    /// The later of two members' errors, but a refusal has precedence: an administrator has to act.
    pub(super) fn prefer_refusal(self, later: Self) -> Self {
        match (&self, &later) {
            (Self::Refused(_), Self::Unreachable(_)) => self,
            _ => later,
        }
    }
}

/// Member as in the config, and its addresses.
#[derive(Clone, Debug)]
struct EtcdMember {
    config: settings::EtcdEndpoint,
    addresses: Vec<SocketAddr>,
}

/// Parameters of all connections, read before the sandbox is entered. Clones share credentials.
#[derive(Clone, Debug)]
pub(super) struct EtcdParameters {
    members: Vec<EtcdMember>,
    proofs: Arc<Mutex<EtcdCredentials>>,
    /// Prefix of the cluster's keys.
    prefix: String,
}

/// Credentials: TLS and login, from files that may be replaced.
#[derive(Clone, Debug)]
pub struct EtcdCredentials {
    tls: Option<EtcdTls>,
    /// For connections from other hosts.
    server: Option<TlsServer>,
    user: Option<(String, String)>,
}

impl EtcdCredentials {
    /// Reads the files. Blocks.
    ///
    /// # Errors
    /// Fails if a file is unreadable or has the wrong content.
    pub fn read(cluster: &ClusterConfig) -> anyhow::Result<Self> {
        let is_tls = cluster.etcd.iter().any(|endpoint| endpoint.tls);
        let tls = is_tls.then(|| EtcdTls::new(cluster.certificates.as_deref())).transpose()?;
        let server = match (&cluster.certificates, cluster.peer_address) {
            (Some(directory), Some(_)) if is_tls => {
                Some(TlsServer::x509(directory, true).context("certificates: for peer-address")?)
            }
            (None, Some(_)) if is_tls => {
                anyhow::bail!("peer-address: needs certificates in [cluster], with server-cert.pem")
            }
            _ => None,
        };
        let user = match cluster.login() {
            Some((user, file)) => {
                let mut text = String::new();
                // Bounded, because a device file may have no end.
                let read = regular_file::open(file).map(|file| file.take(MAX_PASSWORD_BYTES + 1));
                let read = read.and_then(|mut file| file.read_to_string(&mut text));
                read.with_context(|| format!("password-file {}", file.display()))?;
                let is_short = text.len() as u64 <= MAX_PASSWORD_BYTES;
                ensure!(is_short, "password-file {}: is too long for a password", file.display());
                Some((user.to_owned(), text.trim_end_matches(['\n', '\r']).to_owned()))
            }
            None => None,
        };
        Ok(Self { tls, server, user })
    }
}

impl EtcdParameters {
    /// Resolves names and reads the credentials. Blocks.
    ///
    /// # Errors
    /// Fails if a file is unreadable, or if no name can be resolved.
    pub(super) fn new(cluster: &ClusterConfig) -> anyhow::Result<Self> {
        let mut members = Vec::new();
        let mut unknown = None;
        for endpoint in &cluster.etcd {
            match (endpoint.host.as_str(), endpoint.port).to_socket_addrs() {
                Ok(found) => {
                    members.push(EtcdMember { config: endpoint.clone(), addresses: found.collect() });
                }
                // Skipped for good: the sandbox forbids resolving it later.
                Err(error) => {
                    tracing::warn!(
                        etcd = %endpoint, %error,
                        "the name cannot be resolved: the member is ignored until a restart"
                    );
                    unknown = Some(anyhow!("{endpoint}: {error}"));
                }
            }
        }
        if let Some(error) = unknown.filter(|_| members.is_empty()) {
            return Err(error.context("etcd: no name can be resolved (correct the names, or use addresses)"));
        }
        let prefix = format!("/weir/v1/{}/", cluster.name);
        Ok(Self { members, proofs: Arc::new(Mutex::new(EtcdCredentials::read(cluster)?)), prefix })
    }

    /// Sets the credentials of later connections.
    pub(super) fn set_credentials(&self, proofs: EtcdCredentials) {
        *self.proofs.lock().unwrap_or_else(PoisonError::into_inner) = proofs;
    }

    fn credentials(&self) -> EtcdCredentials {
        self.proofs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Credentials for connections to other hosts; `None` without TLS.
    pub(super) fn peer_client(&self) -> Option<SslConnector> {
        self.credentials().tls.map(|EtcdTls(connector)| connector)
    }

    /// Credentials for connections from other hosts; `None` without TLS.
    pub(super) fn peer_server(&self) -> Option<TlsServer> {
        self.credentials().server
    }

    /// Connects to a member.
    async fn open(&self, at: usize) -> Result<EtcdConnection, EtcdError> {
        let (member, tls) = (&self.members[at], self.credentials().tls);
        EtcdConnection::open(member.config.clone(), &member.addresses, tls.as_ref(), REQUEST_TIMEOUT).await
    }

    /// Ports that connections use; all hosts have the same one for each other.
    pub(super) fn ports(cluster: &ClusterConfig) -> Vec<u16> {
        let peer = cluster.peer_address.map(|address| address.port());
        let mut ports: Vec<_> = cluster.etcd.iter().map(|member| member.port).chain(peer).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }
}

/// Connection to a member of etcd that answers.
#[derive(Debug)]
pub(super) struct EtcdClient {
    terms: EtcdParameters,
    at: usize,
    connection: EtcdConnection,
    token: Option<String>,
    slowest: Duration,
    /// Id of the member's etcd cluster, after the first answer.
    cluster: Option<String>,
    /// True once all other members confirmed the same id.
    is_checked: bool,
}

/// Result of a transaction.
#[derive(Debug)]
pub(super) struct TransactionResult {
    pub(super) succeeded: bool,
    pub(super) revision: i64,
    /// Results of its range operations, in order.
    pub(super) found: Vec<Vec<EtcdKeyValue>>,
}

impl EtcdClient {
    /// Connects to the first member that answers, beginning with `first`, and logs in if needed.
    ///
    /// A slow member does not delay the other ones: leases expire meanwhile, and a stalled member
    /// is recognized only by its silence.
    ///
    /// # Errors
    /// Returns the last member's error; a refusal has precedence.
    pub(super) async fn connect(terms: &EtcdParameters, first: usize) -> Result<Self, EtcdError> {
        let count = terms.members.len();
        let mut last = EtcdError::unknown_member();
        let (mut next, mut attempts) = ((0..count).map(|step| (first + step) % count), JoinSet::new());
        loop {
            match next.next() {
                Some(at) => drop(attempts.spawn(Self::connect_and_probe(terms.clone(), at))),
                None if attempts.is_empty() => return Err(last),
                None => {}
            }
            let timeout = if next.len() > 0 { PARALLEL_CONNECT_DELAY } else { Duration::MAX };
            match tokio::time::timeout(timeout, attempts.join_next()).await {
                Ok(Some(Ok(Ok(mut etcd)))) => {
                    etcd.check_others().await?;
                    return Ok(etcd);
                }
                Ok(Some(Ok(Err(error)))) => last = last.prefer_refusal(error),
                // After `PARALLEL_CONNECT_DELAY` the next member is tried in parallel.
                _ => {}
            }
        }
    }

    /// Fails if another member belongs to another etcd cluster: the hosts of each etcd cluster
    /// would divide the whole limit among themselves.
    ///
    /// Members that do not answer at once are queried again at the next call, until all have
    /// answered.
    pub(super) async fn check_others(&mut self) -> Result<(), EtcdError> {
        if self.is_checked {
            return Ok(());
        }
        let mut requests = JoinSet::new();
        for at in (0..self.terms.members.len()).filter(|at| *at != self.at) {
            requests.spawn(Self::cluster_of(self.terms.clone(), at));
        }
        let check = async {
            let mut have_all_answered = true;
            while let Some(result) = requests.join_next().await {
                let Ok(Some((member, cluster))) = result else {
                    have_all_answered = false;
                    continue;
                };
                if self.cluster.as_ref().is_some_and(|own_cluster| *own_cluster != cluster) {
                    return Err(EtcdError::Refused(different_clusters(&self.member(), &member)));
                }
            }
            Ok(have_all_answered)
        };
        self.is_checked = tokio::time::timeout(PARALLEL_CONNECT_DELAY, check).await.unwrap_or(Ok(false))?;
        Ok(())
    }

    /// Name of a member and the id of its cluster, which needs no login.
    async fn cluster_of(terms: EtcdParameters, at: usize) -> Option<(String, String)> {
        let mut connection = terms.open(at).await.ok()?;
        let (_, reply) = connection.request("/v3/maintenance/status", &json!({}), None).await.ok()?;
        Some((terms.members[at].config.to_string(), reply["header"]["cluster_id"].as_str()?.to_owned()))
    }

    /// Connects, and requires one answer: the kernel accepts connections for a stalled process as
    /// well.
    async fn connect_and_probe(terms: EtcdParameters, at: usize) -> Result<Self, EtcdError> {
        let mut etcd = Self::connect_to(&terms, at).await?;
        etcd.keys(&[KeyRange::Key(terms.prefix)]).await?;
        Ok(etcd)
    }

    /// Connects to this member.
    ///
    /// # Errors
    /// Fails if it does not answer, or refuses the login.
    pub(super) async fn connect_to(terms: &EtcdParameters, at: usize) -> Result<Self, EtcdError> {
        let connection = terms.open(at).await?;
        let mut etcd = Self {
            terms: terms.clone(),
            at,
            connection,
            token: None,
            slowest: Duration::ZERO,
            cluster: None,
            is_checked: false,
        };
        etcd.authenticate().await?;
        Ok(etcd)
    }

    /// Longest duration of a request since the last call.
    pub(super) fn take_slowest(&mut self) -> Duration {
        std::mem::take(&mut self.slowest)
    }

    /// Id of its cluster, after the first answer.
    pub(super) fn cluster(&self) -> Option<&str> {
        self.cluster.as_deref()
    }

    /// Number of members.
    pub(super) fn members(terms: &EtcdParameters) -> usize {
        terms.members.len()
    }

    /// Index of the member. The next one is `+ 1`.
    pub(super) const fn at(&self) -> usize {
        self.at
    }

    pub(super) fn member(&self) -> String {
        self.terms.members[self.at].config.to_string()
    }

    async fn authenticate(&mut self) -> Result<(), EtcdError> {
        let Some((name, password)) = self.terms.credentials().user else { return Ok(()) };
        self.token = None;
        let result = self.post_once(AUTHENTICATE, json!({ "name": name, "password": password })).await;
        match result {
            Ok(reply) => {
                self.token = reply["token"].as_str().map(str::to_owned);
                Ok(())
            }
            // Without users in etcd the password is superfluous and harmless.
            Err(EtcdError::Refused(why)) if why.contains("authentication is not enabled") => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn post(&mut self, path: &str, body: Value) -> Result<Value, EtcdError> {
        match self.post_once(path, body.clone()).await {
            // Simple tokens expire after five minutes (etcd's default).
            Err(EtcdError::Refused(why)) if self.token.is_some() && is_token_error(&why) => {
                self.authenticate().await?;
                self.post_once(path, body).await
            }
            other => other,
        }
    }

    async fn post_once(&mut self, path: &str, body: Value) -> Result<Value, EtcdError> {
        let request = self.connection.request(path, &body, self.token.as_deref());
        let timeout = if path == AUTHENTICATE { LOGIN_TIMEOUT } else { REQUEST_TIMEOUT };
        let began = Instant::now();
        let result = tokio::time::timeout(timeout, request).await;
        // Measured for failures as well: a timeout is the slowest request.
        self.slowest = self.slowest.max(began.elapsed());
        let member = || self.terms.members[self.at].config.to_string();
        match result {
            Ok(Ok((status, reply))) if status.is_success() => {
                self.cluster = reply["header"]["cluster_id"].as_str().map(str::to_owned);
                Ok(reply)
            }
            Ok(Ok((_, reply))) => {
                Err(refusal_error(&member(), &self.terms.prefix, self.token.is_some(), &reply))
            }
            Ok(Err(error)) => Err(error),
            Err(_) => {
                Err(EtcdError::Unreachable(anyhow!("{}: no answer in {} s", member(), timeout.as_secs())))
            }
        }
    }

    /// Reads all keys of several ranges, at one revision.
    pub(super) async fn read(
        &mut self,
        ranges: &[KeyRange],
    ) -> Result<(i64, Vec<Vec<EtcdKeyValue>>), EtcdError> {
        let operations: Vec<_> = ranges.iter().cloned().map(EtcdOperation::Get).collect();
        let result = self.transact(&[], &operations).await?;
        Ok((result.revision, result.found))
    }

    /// Reads the keys without their values.
    pub(super) async fn keys(&mut self, ranges: &[KeyRange]) -> Result<Vec<Vec<EtcdKeyValue>>, EtcdError> {
        let operations: Vec<_> = ranges.iter().cloned().map(EtcdOperation::Keys).collect();
        Ok(self.transact(&[], &operations).await?.found)
    }

    /// Reads one key.
    pub(super) async fn read_one(&mut self, key: KeyRange) -> Result<Option<EtcdKeyValue>, EtcdError> {
        let (_, found) = self.read(&[key]).await?;
        Ok(found.into_iter().flatten().next())
    }

    /// Performs all operations if all comparisons hold, else none.
    pub(super) async fn transact(
        &mut self,
        compare: &[TransactionCondition],
        then: &[EtcdOperation],
    ) -> Result<TransactionResult, EtcdError> {
        let body = json!({
            "compare": compare.iter().map(TransactionCondition::body).collect::<Vec<_>>(),
            "success": then.iter().map(EtcdOperation::body).collect::<Vec<_>>(),
        });
        let reply = self.post("/v3/kv/txn", body).await?;
        let revision = message::number(&reply["header"]["revision"]).unwrap_or(0);
        let succeeded = reply["succeeded"].as_bool().unwrap_or(false);
        let mut found = Vec::new();
        for response in reply["responses"].as_array().into_iter().flatten() {
            if let Some(range) = response.get("response_range") {
                found.push(EtcdKeyValue::all(&range["kvs"]));
            }
        }
        Ok(TransactionResult { succeeded, revision, found })
    }

    /// Fails if the user may not write the cluster's keys. Writes nothing: etcd checks the rights
    /// first, and the comparison (created at a revision below 0) never holds.
    pub(super) async fn check_rights(&mut self) -> Result<(), EtcdError> {
        let key = self.terms.prefix.clone();
        let put = EtcdOperation::put(&key, b"", None);
        self.transact(&[TransactionCondition::Created(key, -1)], &[put]).await.map(drop)
    }

    pub(super) async fn put(&mut self, key: &str, value: &[u8], lease: Option<i64>) -> Result<(), EtcdError> {
        let body = EtcdOperation::put(key, value, lease).put_body();
        self.post("/v3/kv/put", body).await.map(drop)
    }

    /// Creates a lease.
    pub(super) async fn grant_lease(&mut self, seconds: u64) -> Result<i64, EtcdError> {
        let reply = self.post("/v3/lease/grant", json!({ "TTL": seconds.to_string() })).await?;
        let id = message::number(&reply["ID"]);
        // Other software, or an older etcd with other paths, answers without an id.
        id.ok_or_else(|| {
            EtcdError::Unreachable(anyhow!("etcd: its answer has no lease (is this etcd 3.4 or newer?)"))
        })
    }

    /// Renews a lease. False if it has expired.
    pub(super) async fn keep_lease(&mut self, lease: i64) -> Result<bool, EtcdError> {
        let reply = self.post("/v3/lease/keepalive", json!({ "ID": lease.to_string() })).await?;
        Ok(message::number(&reply["result"]["TTL"]).is_some_and(|seconds| seconds > 0))
    }

    /// Revokes a lease and deletes its keys.
    pub(super) async fn revoke_lease(&mut self, lease: i64) -> Result<(), EtcdError> {
        self.post("/v3/lease/revoke", json!({ "ID": lease.to_string() })).await.map(drop)
    }

    /// Watches a range from a revision on, over a second connection.
    pub(super) async fn watch(&self, range: &KeyRange, from: i64) -> Result<EtcdWatch, EtcdError> {
        let connection = self.terms.open(self.at).await?;
        EtcdWatch::open(connection, range, from, self.token.as_deref(), REQUEST_TIMEOUT).await
    }
}

/// True if the token expired, or users changed since.
fn is_token_error(why: &str) -> bool {
    why.contains("invalid auth token") || why.contains("auth store is old")
}

/// Message for two members of different clusters.
pub(super) fn different_clusters(member: &str, other_member: &str) -> String {
    format!(
        "etcd {member} and {other_member} belong to different clusters (list members of one in etcd of [cluster]; \
         `etcdctl member list` shows them)"
    )
}

/// Error for a member's refusal. Some are transient, and another member may answer.
fn refusal_error(member: &str, prefix: &str, has_user: bool, answer: &Value) -> EtcdError {
    let text = ["message", "error"].iter().find_map(|key| answer[*key].as_str()).unwrap_or("no reason given");
    let text: String = sanitize(text).chars().take(200).collect();
    // No quorum, a member that starts or stops, or overload.
    let transient = [
        "no leader",
        "timed out",
        "leader changed",
        "unavailable",
        "stopped",
        "too many requests",
        "not ready",
    ];
    let message = format!("etcd {member}: {text}");
    if transient.iter().any(|phrase| text.contains(phrase)) {
        return EtcdError::Unreachable(anyhow!(message));
    }
    if !has_user && ["permission denied", "user name is empty"].iter().any(|phrase| text.contains(phrase)) {
        let advice = "etcd has users: set user and password-file of [cluster]";
        return EtcdError::Refused(format!("{message} ({advice})"));
    }
    if text.contains("authentication failed") || text.contains("user name") {
        return EtcdError::Refused(format!(
            "etcd {member} rejects the user and password of [cluster]: {text} (correct user, and \
             restart weir; or correct password-file, and run `weir reload`)"
        ));
    }
    let role_advice = format!("give the user of [cluster] a role that reads and writes {prefix}");
    let advice = match () {
        () if text.contains("permission denied") => &role_advice,
        () if text.contains("database space exceeded") => {
            "compact and defragment etcd, then disarm its alarm"
        }
        () => "is this etcd 3.4 or newer?",
    };
    EtcdError::Refused(format!("{message} ({advice})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_right_names_the_key_prefix() {
        let reply = json!({ "message": "etcdserver: permission denied" });
        let message = refusal_error("http://e:2379", "/weir/v1/lab/", true, &reply).to_string();
        assert!(message.ends_with("a role that reads and writes /weir/v1/lab/)"), "{message}");
        let reply = json!({ "message": "etcdserver: authentication failed, invalid user ID or password" });
        let message = refusal_error("http://e:2379", "/weir/v1/lab/", true, &reply).to_string();
        assert!(
            message.starts_with("etcd http://e:2379 rejects the user and password of [cluster]: "),
            "{message}"
        );
        let reply = json!({ "error": "\x1b[2J\u{202e}" });
        let message = refusal_error("http://e:2379", "/weir/v1/lab/", true, &reply).to_string();
        assert!(message.starts_with("etcd http://e:2379: ?[2J? ("), "{message}");
    }
}
