//! A client of etcd: its gateway for JSON (`/v3/…`, HTTP/1.1), as far as a cluster needs it.
//!
//! ```text
//!   Etcd ── one member at a time ──► Connection ── one request, one answer ──►   POST /v3/kv/txn
//!    │                                                                           POST /v3/lease/…
//!    └── Watch: a connection of its own, an answer that does not end ────────►   POST /v3/watch
//! ```
//!
//! Why not gRPC: `docs/decisions/0042-etcd-by-its-gateway.md`. Whatever goes wrong with a member
//! ends the connection; who comes next asks another member. Answers are bounded in length and time.
//!
//! Names of members are looked up once, before the sandbox. Never knows what the keys mean.

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
use reactor::{plain::plain, regular};
use serde_json::{Value, json};
use settings::Cluster;
use tokio::task::JoinSet;

use connection::{Connection, Tls};
pub(super) use message::{Compare, Event, KeyValue, Operation, Range};
pub(super) use watch::{Watch, events};

/// How long a member may take over a request: less than half a lease, so that another can be asked.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long one is waited for before the next is asked too.
const BESIDE: Duration = Duration::from_millis(100);
/// The same for a password, which etcd makes slow to try by design.
const PATIENCE_FOR_PASSWORDS: Duration = Duration::from_secs(4);
const AUTHENTICATE: &str = "/v3/auth/authenticate";
/// Operations of a transaction: etcd's `--max-txn-ops`, by default.
pub(super) const MAX_OPERATIONS: usize = 128;
/// Keys and values of a transaction: well below etcd's `--max-request-bytes`, by default.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// Bytes of a password.
const MAX_PASSWORD: u64 = 4096;

/// Why etcd did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Nobody answers, or not in time: another member may.
    #[error("{0:#}")]
    Unreachable(anyhow::Error),
    /// It answers that it will not: trying again is of no use before somebody has mended it.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    fn unreachable(error: impl Into<anyhow::Error>) -> Self {
        Self::Unreachable(error.into())
    }

    /// Before any member was asked.
    pub(super) fn no_member() -> Self {
        Self::Unreachable(anyhow!("etcd: no member is known"))
    }

    /// Of two members' the later, but rather what somebody has to mend.
    pub(super) fn or_rather(self, later: Self) -> Self {
        match (&self, &later) {
            (Self::Refused(_), Self::Unreachable(_)) => self,
            _ => later,
        }
    }
}

/// A member, by what the config calls it and where it is.
#[derive(Clone, Debug)]
struct Member {
    said: settings::Etcd,
    addresses: Vec<SocketAddr>,
}

/// What all connections are made with. Made before the sandbox is entered. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    members: Vec<Member>,
    proofs: Arc<Mutex<Proofs>>,
    /// Of the cluster's keys.
    prefix: String,
}

/// Who etcd is, and who asks: of files, which may be replaced.
#[derive(Clone, Debug)]
pub struct Proofs {
    tls: Option<Tls>,
    user: Option<(String, String)>,
}

impl Proofs {
    /// Blocks.
    ///
    /// # Errors
    /// If a file is not what it is taken for.
    pub fn read(cluster: &Cluster) -> anyhow::Result<Self> {
        let is_tls = cluster.etcd.iter().any(|said| said.tls);
        let tls = is_tls.then(|| Tls::new(cluster.certificates.as_deref())).transpose()?;
        let user = match cluster.login() {
            Some((user, file)) => {
                let mut text = String::new();
                // A device may go on for ever.
                let read = regular::open(file).map(|file| file.take(MAX_PASSWORD + 1));
                let read = read.and_then(|mut file| file.read_to_string(&mut text));
                read.with_context(|| format!("password-file {}", file.display()))?;
                let is_short = text.len() as u64 <= MAX_PASSWORD;
                ensure!(is_short, "password-file {}: is no password: too long", file.display());
                Some((user.to_owned(), text.trim_end_matches(['\n', '\r']).to_owned()))
            }
            None => None,
        };
        Ok(Self { tls, user })
    }
}

impl Terms {
    /// Looks names up, and reads keys and the password. Blocks.
    ///
    /// # Errors
    /// If a file is not what it is taken for, or no name stands for an address.
    pub(super) fn new(cluster: &Cluster) -> anyhow::Result<Self> {
        let mut members = Vec::new();
        let mut unknown = None;
        for said in &cluster.etcd {
            match (said.host.as_str(), said.port).to_socket_addrs() {
                Ok(found) => members.push(Member { said: said.clone(), addresses: found.collect() }),
                Err(error) => {
                    tracing::warn!(etcd = %said, %error, "this name stands for no address now: the member is left out");
                    unknown = Some(anyhow!("{said}: {error}"));
                }
            }
        }
        if let Some(error) = unknown.filter(|_| members.is_empty()) {
            return Err(
                error.context("etcd: no name stands for an address (mend the names, or give addresses)")
            );
        }
        let prefix = format!("/weir/v1/{}/", cluster.name);
        Ok(Self { members, proofs: Arc::new(Mutex::new(Proofs::read(cluster)?)), prefix })
    }

    /// For connections from now on.
    pub(super) fn renew(&self, proofs: Proofs) {
        *self.proofs.lock().unwrap_or_else(PoisonError::into_inner) = proofs;
    }

    fn proofs(&self) -> Proofs {
        self.proofs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A connection to a member.
    async fn open(&self, at: usize) -> Result<Connection, Error> {
        let (member, tls) = (&self.members[at], self.proofs().tls);
        Connection::open(member.said.clone(), &member.addresses, tls.as_ref(), PATIENCE).await
    }

    /// Ports that are called.
    pub(super) fn ports(cluster: &Cluster) -> Vec<u16> {
        let mut ports: Vec<_> = cluster.etcd.iter().map(|member| member.port).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }
}

/// A member of etcd that answers.
#[derive(Debug)]
pub(super) struct Etcd {
    terms: Terms,
    at: usize,
    connection: Connection,
    token: Option<String>,
    slowest: Duration,
    /// The number of the cluster that it is a member of, once it has said that.
    cluster: Option<String>,
    /// Whether all others have said that they are of the same.
    is_checked: bool,
}

/// What became of a transaction.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) held: bool,
    pub(super) revision: i64,
    /// Of the ranges that were asked for, in their order.
    pub(super) found: Vec<Vec<KeyValue>>,
}

impl Etcd {
    /// The first member that lets this daemon in and answers, beginning with this one; asked who
    /// this is, if it wants that. Beside one that takes its time the next is asked: leases run, and
    /// of a member that stands still only its silence tells.
    ///
    /// # Errors
    /// That of the last one, and of those rather what one refused.
    pub(super) async fn connect(terms: &Terms, first: usize) -> Result<Self, Error> {
        let count = terms.members.len();
        let mut last = Error::no_member();
        let (mut next, mut asked) = ((0..count).map(|step| (first + step) % count), JoinSet::new());
        loop {
            match next.next() {
                Some(at) => drop(asked.spawn(Self::connect_to_one_that_answers(terms.clone(), at))),
                None if asked.is_empty() => return Err(last),
                None => {}
            }
            let patience = if next.len() > 0 { BESIDE } else { Duration::MAX };
            match tokio::time::timeout(patience, asked.join_next()).await {
                Ok(Some(Ok(Ok(mut etcd)))) => {
                    etcd.check_others().await?;
                    return Ok(etcd);
                }
                Ok(Some(Ok(Err(error)))) => last = last.or_rather(error),
                // None has answered yet.
                _ => {}
            }
        }
    }

    /// Fails where another member is of another cluster: hosts that ask one, and hosts that ask the
    /// other, would have the whole limit each. Who does not answer soon is not waited for, and is
    /// asked again the next time. Once all have answered nobody is.
    pub(super) async fn check_others(&mut self) -> Result<(), Error> {
        if self.is_checked {
            return Ok(());
        }
        let mut asked = JoinSet::new();
        for at in (0..self.terms.members.len()).filter(|at| *at != self.at) {
            asked.spawn(Self::cluster_of(self.terms.clone(), at));
        }
        let check = async {
            let mut have_all_answered = true;
            while let Some(answer) = asked.join_next().await {
                let Ok(Some((member, cluster))) = answer else {
                    have_all_answered = false;
                    continue;
                };
                if self.cluster.as_ref().is_some_and(|own| *own != cluster) {
                    return Err(Error::Refused(of_two(&self.member(), &member)));
                }
            }
            Ok(have_all_answered)
        };
        self.is_checked = tokio::time::timeout(BESIDE, check).await.unwrap_or(Ok(false))?;
        Ok(())
    }

    /// A member, and the number of its cluster, which it tells everybody.
    async fn cluster_of(terms: Terms, at: usize) -> Option<(String, String)> {
        let mut connection = terms.open(at).await.ok()?;
        let (_, answer) = connection.ask("/v3/maintenance/status", &json!({}), None).await.ok()?;
        Some((terms.members[at].said.to_string(), answer["header"]["cluster_id"].as_str()?.to_owned()))
    }

    /// A member that stands still lets everybody in as well: the kernel does that for it.
    async fn connect_to_one_that_answers(terms: Terms, at: usize) -> Result<Self, Error> {
        let mut etcd = Self::connect_to(&terms, at).await?;
        etcd.keys(&[Range::Key(terms.prefix)]).await?;
        Ok(etcd)
    }

    /// That member, or none.
    ///
    /// # Errors
    /// If it does not answer, or lets nobody of this name in.
    pub(super) async fn connect_to(terms: &Terms, at: usize) -> Result<Self, Error> {
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

    /// The longest that a request took since this was asked last.
    pub(super) fn take_slowest(&mut self) -> Duration {
        std::mem::take(&mut self.slowest)
    }

    /// The number of its cluster, once it was asked something.
    pub(super) fn cluster(&self) -> Option<&str> {
        self.cluster.as_deref()
    }

    /// How many members there are.
    pub(super) fn members(terms: &Terms) -> usize {
        terms.members.len()
    }

    /// Which member it is: another is `+ 1`.
    pub(super) const fn at(&self) -> usize {
        self.at
    }

    pub(super) fn member(&self) -> String {
        self.terms.members[self.at].said.to_string()
    }

    async fn authenticate(&mut self) -> Result<(), Error> {
        let Some((name, password)) = self.terms.proofs().user else { return Ok(()) };
        self.token = None;
        let answer = self.post_once(AUTHENTICATE, json!({ "name": name, "password": password })).await;
        match answer {
            Ok(answer) => {
                self.token = answer["token"].as_str().map(str::to_owned);
                Ok(())
            }
            // A password is of no use there, and does no harm.
            Err(Error::Refused(why)) if why.contains("authentication is not enabled") => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn post(&mut self, path: &str, body: Value) -> Result<Value, Error> {
        match self.post_once(path, body.clone()).await {
            // Tokens end after five minutes.
            Err(Error::Refused(why)) if self.token.is_some() && is_of_token(&why) => {
                self.authenticate().await?;
                self.post_once(path, body).await
            }
            other => other,
        }
    }

    async fn post_once(&mut self, path: &str, body: Value) -> Result<Value, Error> {
        let asked = self.connection.ask(path, &body, self.token.as_deref());
        let patience = if path == AUTHENTICATE { PATIENCE_FOR_PASSWORDS } else { PATIENCE };
        let began = Instant::now();
        let asked = tokio::time::timeout(patience, asked).await;
        self.slowest = self.slowest.max(began.elapsed());
        let member = || self.terms.members[self.at].said.to_string();
        match asked {
            Ok(Ok((status, answer))) if status.is_success() => {
                self.cluster = answer["header"]["cluster_id"].as_str().map(str::to_owned);
                Ok(answer)
            }
            Ok(Ok((_, answer))) => {
                Err(refusal(&member(), &self.terms.prefix, (self.token.is_some(), &answer)))
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::Unreachable(anyhow!("{}: no answer in {} s", member(), patience.as_secs()))),
        }
    }

    /// All keys of several ranges, as of one revision.
    pub(super) async fn read(&mut self, ranges: &[Range]) -> Result<(i64, Vec<Vec<KeyValue>>), Error> {
        let operations: Vec<_> = ranges.iter().cloned().map(Operation::Get).collect();
        let done = self.transact(&[], &operations).await?;
        Ok((done.revision, done.found))
    }

    /// The same without their values.
    pub(super) async fn keys(&mut self, ranges: &[Range]) -> Result<Vec<Vec<KeyValue>>, Error> {
        let operations: Vec<_> = ranges.iter().cloned().map(Operation::Keys).collect();
        Ok(self.transact(&[], &operations).await?.found)
    }

    /// The value of one key.
    pub(super) async fn read_one(&mut self, key: Range) -> Result<Option<KeyValue>, Error> {
        let (_, found) = self.read(&[key]).await?;
        Ok(found.into_iter().flatten().next())
    }

    /// Does all of it where all comparisons hold, else nothing.
    pub(super) async fn transact(&mut self, compare: &[Compare], then: &[Operation]) -> Result<Done, Error> {
        let body = json!({
            "compare": compare.iter().map(Compare::body).collect::<Vec<_>>(),
            "success": then.iter().map(Operation::body).collect::<Vec<_>>(),
        });
        let answer = self.post("/v3/kv/txn", body).await?;
        let revision = message::number(&answer["header"]["revision"]).unwrap_or(0);
        let held = answer["succeeded"].as_bool().unwrap_or(false);
        let mut found = Vec::new();
        for response in answer["responses"].as_array().into_iter().flatten() {
            if let Some(range) = response.get("response_range") {
                found.push(KeyValue::all(&range["kvs"]));
            }
        }
        Ok(Done { held, revision, found })
    }

    /// Fails where the user may not write the cluster's keys. Writes nothing: etcd looks at the
    /// rights first, and no key was made in a revision below 0.
    pub(super) async fn check_rights(&mut self) -> Result<(), Error> {
        let key = self.terms.prefix.clone();
        let put = Operation::put(&key, b"", None);
        self.transact(&[Compare::Created(key, -1)], &[put]).await.map(drop)
    }

    pub(super) async fn put(&mut self, key: &str, value: &[u8], lease: Option<i64>) -> Result<(), Error> {
        let body = Operation::put(key, value, lease).put_body();
        self.post("/v3/kv/put", body).await.map(drop)
    }

    /// A lease of so many seconds.
    pub(super) async fn grant_lease(&mut self, seconds: u64) -> Result<i64, Error> {
        let answer = self.post("/v3/lease/grant", json!({ "TTL": seconds.to_string() })).await?;
        let id = message::number(&answer["ID"]);
        id.ok_or_else(|| {
            Error::Unreachable(anyhow!("etcd: its answer has no lease (is this etcd 3.4 or newer?)"))
        })
    }

    /// Whether it was still there.
    pub(super) async fn keep_lease(&mut self, lease: i64) -> Result<bool, Error> {
        let answer = self.post("/v3/lease/keepalive", json!({ "ID": lease.to_string() })).await?;
        Ok(message::number(&answer["result"]["TTL"]).is_some_and(|seconds| seconds > 0))
    }

    /// With all keys that have it.
    pub(super) async fn revoke_lease(&mut self, lease: i64) -> Result<(), Error> {
        self.post("/v3/lease/revoke", json!({ "ID": lease.to_string() })).await.map(drop)
    }

    /// What changes in a range from a revision on, over a connection of its own.
    pub(super) async fn watch(&self, range: &Range, from: i64) -> Result<Watch, Error> {
        let connection = self.terms.open(self.at).await?;
        Watch::open(connection, range, from, self.token.as_deref(), PATIENCE).await
    }
}

/// It has ended, or users have changed since.
fn is_of_token(why: &str) -> bool {
    why.contains("invalid auth token") || why.contains("auth store is old")
}

/// That two members are of two clusters.
pub(super) fn of_two(member: &str, beside: &str) -> String {
    format!(
        "etcd {member} and {beside} are not of one cluster (have members of one in etcd of [cluster]; \
         `etcdctl member list` tells who is)"
    )
}

/// What a member says where it does not do as asked. Some of it another member may do.
fn refusal(member: &str, prefix: &str, (has_user, answer): (bool, &Value)) -> Error {
    let text = ["message", "error"].iter().find_map(|key| answer[*key].as_str()).unwrap_or("no reason given");
    let text: String = plain(text).chars().take(200).collect();
    // Without a leader, starting, stopping, or slow.
    let passing = [
        "no leader",
        "timed out",
        "leader changed",
        "unavailable",
        "stopped",
        "too many requests",
        "not ready",
    ];
    let said = format!("etcd {member}: {text}");
    if passing.iter().any(|word| text.contains(word)) {
        return Error::Unreachable(anyhow!(said));
    }
    if !has_user && ["permission denied", "user name is empty"].iter().any(|word| text.contains(word)) {
        let advice = "etcd has users: set user and password-file of [cluster]";
        return Error::Refused(format!("{said} ({advice})"));
    }
    if text.contains("authentication failed") || text.contains("user name") {
        return Error::Refused(format!(
            "etcd {member} refuses the user and password of [cluster]: {text} (mend user, and restart weir; or mend password-file, which `weir reload` reads)"
        ));
    }
    let of_role = format!("give the user of [cluster] a role that reads and writes {prefix}");
    let advice = match () {
        () if text.contains("permission denied") => &of_role,
        () if text.contains("database space exceeded") => {
            "compact and defragment etcd, then disarm its alarm"
        }
        () => "is this etcd 3.4 or newer?",
    };
    Error::Refused(format!("{said} ({advice})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_lacks_a_right_is_told_of_the_clusters_own_keys() {
        let answer = json!({ "message": "etcdserver: permission denied" });
        let said = refusal("http://e:2379", "/weir/v1/lab/", (true, &answer)).to_string();
        assert!(said.ends_with("a role that reads and writes /weir/v1/lab/)"), "{said}");
        let answer = json!({ "message": "etcdserver: authentication failed, invalid user ID or password" });
        let said = refusal("http://e:2379", "/weir/v1/lab/", (true, &answer)).to_string();
        assert!(
            said.starts_with("etcd http://e:2379 refuses the user and password of [cluster]: "),
            "{said}"
        );
        let answer = json!({ "error": "\x1b[2J\u{202e}" });
        let said = refusal("http://e:2379", "/weir/v1/lab/", (true, &answer)).to_string();
        assert!(said.starts_with("etcd http://e:2379: ?[2J? ("), "{said}");
    }
}
