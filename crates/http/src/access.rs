//! Access control: which requests are answered, and which may change settings.
//!
//! ```text
//!   Host    an address, localhost, or a configured name: protects against DNS rebinding
//!   Origin  if present, this page
//!   token   compared in constant time; after too many wrong ones a client has to wait, also with
//!           the right one
//! ```
//!
//! There are no cookies, so a request from another site carries no credentials.

use std::{
    collections::VecDeque,
    net::{Ipv4Addr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Extension,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, StatusCode, Uri,
        header::{
            AUTHORIZATION, CONTENT_SECURITY_POLICY, HOST, ORIGIN, REFERRER_POLICY, RETRY_AFTER,
            WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
        },
        uri::Authority,
    },
    middleware::Next,
    response::Response,
};
use openssl::sha::sha256;

use super::{peer::HttpPeer, responses::error_response};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

/// Headers of every response.
const HEADERS: [(HeaderName, &str); 6] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
];

/// Wrong tokens that an address may send in a burst, and then one in each [`DECAY_INTERVAL`].
const MAX_WRONG_TOKENS: u32 = 10;
const DECAY_INTERVAL: Duration = Duration::from_secs(1);
const TOO_MANY_WRONG_TOKENS: &str =
    "too many wrong tokens came from this address: it has one attempt per second, also with the right token";
/// Number of addresses whose wrong tokens are counted, the most recent ones.
const MAX_PEERS: usize = 256;
/// Interval between two log messages about wrong tokens.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

pub(super) struct AccessGuard {
    /// Names of this host, in lower case.
    names: Vec<String>,
    /// SHA-256 of the token; `None` makes the page read-only.
    token: Option<[u8; 32]>,
    wrong: Mutex<WrongTokens>,
}

#[derive(Default)]
struct WrongTokens {
    /// Client, count of wrong tokens, and the instant of that count; the most recent last.
    by_peer: VecDeque<(HttpPeer, u32, Instant)>,
    logged_at: Option<Instant>,
    /// Wrong tokens since the last log message.
    unlogged: u64,
}

impl AccessGuard {
    pub(super) fn new(names: Vec<String>, token: Option<&[u8]>) -> Arc<Self> {
        Arc::new(Self { names, token: token.map(sha256), wrong: Mutex::default() })
    }

    pub(super) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    fn is_known_host(&self, authority: &str) -> bool {
        // The port is digits or empty (RFC 3986, section 3.2.3).
        let is_port = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
        let host = match authority.rsplit_once(':') {
            Some((host, port)) if is_port(port) && !host.ends_with(':') => host,
            _ => authority,
        };
        if let Some(host) = host.strip_prefix('[') {
            return host.strip_suffix(']').is_some_and(|host| host.parse::<Ipv6Addr>().is_ok());
        }
        // A fully qualified name may end with a dot.
        let host = host.strip_suffix('.').unwrap_or(host);
        host.parse::<Ipv4Addr>().is_ok()
            || host.eq_ignore_ascii_case("localhost")
            || self.names.iter().any(|name| host.eq_ignore_ascii_case(name))
    }

    /// Checks `Host` and `Origin`.
    fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
        let only = |name: HeaderName| {
            let mut all = headers.get_all(name).iter();
            let first = all.next().map(|value| value.to_str().unwrap_or_default());
            (first, all.next().is_some())
        };
        let (host, is_doubtful) = only(HOST);
        let host = host
            .filter(|_| !is_doubtful)
            .ok_or((StatusCode::BAD_REQUEST, "Host: is missing or given twice"))?;
        // The request target may have an authority as well, as from a proxy.
        let uri_authority = uri.authority().map(Authority::as_str);
        if !self.is_known_host(host) || !uri_authority.is_none_or(|said| self.is_known_host(said)) {
            let why = "Host: is not a name of this page (use an address, or allow the name with --http-name)";
            return Err((StatusCode::MISDIRECTED_REQUEST, why));
        }
        let (origin, is_doubtful) = only(ORIGIN);
        let is_here = |origin: &str| {
            let authority = origin.split_once("://").map(|(_, authority)| authority);
            authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
        };
        match origin {
            // Browsers send Origin with all requests but plain GET; other clients send none.
            Some(origin) if is_doubtful || !is_here(origin) => {
                let why = "Origin: requests from other pages are rejected (a proxy must forward \
                           the browser's Host)";
                Err((StatusCode::FORBIDDEN, why))
            }
            _ => Ok(()),
        }
    }

    /// Error response to a change without a valid token.
    fn reject_change(&self, peer: HttpPeer, headers: &HeaderMap) -> Option<Response> {
        let (status, why) = self.check_bearer(peer, headers, Instant::now()).err()?;
        let mut response = error_response(status, why);
        let line = match status {
            StatusCode::TOO_MANY_REQUESTS => Some((RETRY_AFTER, "1")),
            StatusCode::UNAUTHORIZED => Some((WWW_AUTHENTICATE, "Bearer realm=\"weir\"")),
            _ => None,
        };
        response.headers_mut().extend(line.map(|(name, value)| (name, HeaderValue::from_static(value))));
        Some(response)
    }

    fn check_bearer(
        &self,
        peer: HttpPeer,
        headers: &HeaderMap,
        now: Instant,
    ) -> Result<(), (StatusCode, &'static str)> {
        let Some(token) = &self.token else {
            let why = "changes are disabled (start weir with --http-token-file)";
            return Err((StatusCode::FORBIDDEN, why));
        };
        let authorization = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        // Any scheme but Bearer is treated as a missing token.
        let bearer = authorization.and_then(|authorization| {
            let (scheme, token) = authorization.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
        });
        let why =
            "a token is required (send Authorization: Bearer TOKEN, with the token of --http-token-file)";
        let bearer = bearer.ok_or((StatusCode::UNAUTHORIZED, why))?;
        let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        if wrong.is_blocked(peer, now) {
            // Not compared: the response would reveal the right token.
            wrong.count(peer, now, false);
            return Err((StatusCode::TOO_MANY_REQUESTS, TOO_MANY_WRONG_TOKENS));
        }
        // Hashes have equal length, so the comparison does not reveal the token's.
        if openssl::memcmp::eq(&sha256(bearer), token) {
            return Ok(());
        }
        wrong.count(peer, now, true);
        Err((StatusCode::FORBIDDEN, "the token is wrong (see --http-token-file)"))
    }
}

impl WrongTokens {
    /// Count after decay by one in each [`DECAY_INTERVAL`], and its instant.
    fn decayed(count: u32, as_of: Instant, now: Instant) -> (u32, Instant) {
        let seconds = now.saturating_duration_since(as_of).as_secs();
        let over = u32::try_from(seconds).unwrap_or(u32::MAX);
        (count.saturating_sub(over), as_of + DECAY_INTERVAL * over.min(count))
    }

    fn is_blocked(&self, peer: HttpPeer, now: Instant) -> bool {
        let known = self.by_peer.iter().find(|(key, ..)| *key == peer.bound_key());
        known.is_some_and(|&(_, count, as_of)| Self::decayed(count, as_of, now).0 >= MAX_WRONG_TOKENS)
    }

    /// Counts a wrong token, and logs unless there was a message in the last [`LOG_INTERVAL`].
    fn count(&mut self, peer: HttpPeer, now: Instant, is_compared: bool) {
        if is_compared {
            let key = peer.bound_key();
            // Moved to the end, as the most recent.
            let at = self.by_peer.iter().position(|(known, ..)| *known == key);
            let before = at.and_then(|at| self.by_peer.remove(at));
            let (count, as_of) = match before {
                Some((_, count, as_of)) => Self::decayed(count, as_of, now),
                None => (0, now),
            };
            let as_of = if count == 0 { now } else { as_of };
            // The least recent address is dropped, so that memory is bounded.
            if self.by_peer.len() >= MAX_PEERS {
                self.by_peer.pop_front();
            }
            self.by_peer.push_back((key, count + 1, as_of));
        }
        self.unlogged += 1;
        if self.logged_at.is_none_or(|last| now.saturating_duration_since(last) >= LOG_INTERVAL) {
            tracing::warn!(
                wrong_tokens = self.unlogged,
                from = %peer,
                "a wrong token was sent over HTTP (more are counted and reported in ten minutes)"
            );
            (self.logged_at, self.unlogged) = (Some(now), 0);
        }
    }
}

/// Middleware for all requests.
pub(super) async fn check(State(guard): State<Arc<AccessGuard>>, request: Request, next: Next) -> Response {
    let mut response = match guard.check(request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err((status, why)) => error_response(status, why),
    };
    let headers = HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value)));
    response.headers_mut().extend(headers);
    response
}

/// Middleware for changes and previews.
pub(super) async fn check_token(
    State(guard): State<Arc<AccessGuard>>,
    Extension(peer): Extension<HttpPeer>,
    request: Request,
    next: Next,
) -> Response {
    match guard.reject_change(peer, request.headers()) {
        None => next.run(request).await,
        Some(refused) => refused,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn guard() -> Arc<AccessGuard> {
        AccessGuard::new(vec!["weir.example.org".to_owned()], Some(b"0123456789abcdef"))
    }

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect()
    }

    fn status(pairs: &[(HeaderName, &str)]) -> Option<u16> {
        guard().check(&Uri::from_static("/"), &headers(pairs)).err().map(|(status, _)| status.as_u16())
    }

    #[test]
    fn host_is_an_address_or_a_configured_name() {
        for known in [
            "127.0.0.1",
            "127.0.0.1:80",
            "[::1]:8080",
            "[::1]",
            "localhost:1",
            "LocalHost",
            "192.0.2.7:80",
            "Weir.Example.org:443",
            "weir.example.org.",
        ] {
            assert_eq!(status(&[(HOST, known)]), None, "{known}");
        }
        for other in [
            "",
            "evil.example.org",
            "weir.example.org.evil",
            "127.0.0.1.evil.org:80",
            "localhost.evil",
            "[::1",
            "[evil]:80",
            "[::1]evil",
            "[::1]:evil",
            "::1",
            "localhost:evil",
        ] {
            assert_eq!(status(&[(HOST, other)]), Some(421), "{other}");
        }
        assert_eq!(status(&[]), Some(400));
        let twice = guard().check(&Uri::from_static("http://evil.org/"), &headers(&[(HOST, "localhost")]));
        assert_eq!(twice.unwrap_err().0, StatusCode::MISDIRECTED_REQUEST);
    }

    #[test]
    fn an_origin_is_this_page() {
        let with = |origin| status(&[(HOST, "localhost:80"), (ORIGIN, origin)]);
        assert_eq!(with("http://localhost:80"), None);
        assert_eq!(with("https://LOCALHOST:80"), None);
        for other in
            ["null", "", "http://localhost", "http://localhost:81", "http://evil.org", "localhost:80"]
        {
            assert_eq!(with(other), Some(403), "{other}");
        }
    }

    #[test]
    fn a_token_is_right_wrong_or_missing() {
        let (guard, now) = (guard(), Instant::now());
        let peer = HttpPeer::User(None);
        let check = |authorization: &str| {
            guard
                .check_bearer(peer, &headers(&[(AUTHORIZATION, authorization)]), now)
                .err()
                .map(|(status, _)| status.as_u16())
        };
        assert_eq!(check("Bearer 0123456789abcdef"), None);
        assert_eq!(check("bearer  0123456789abcdef "), None);
        for wrong in ["Bearer 0123456789abcde", "Bearer 0123456789abcdeff", "Bearer "] {
            assert_eq!(check(wrong), Some(403), "{wrong:?}");
        }
        assert_eq!(check("Basic 0123456789abcdef"), Some(401));
        assert_eq!(check("Bear"), Some(401));
        let none = AccessGuard::new(Vec::new(), None);
        let refused = none.check_bearer(peer, &headers(&[(AUTHORIZATION, "Bearer x")]), now);
        assert_eq!(refused.unwrap_err().0, StatusCode::FORBIDDEN);
    }

    #[test]
    fn wrong_tokens_block_only_their_sender() {
        let (guard, now) = (guard(), Instant::now());
        let peer = |last| HttpPeer::Address(IpAddr::from([192, 0, 2, last]));
        let check = |peer, token: &str, at| {
            let sent = headers(&[(AUTHORIZATION, &format!("Bearer {token}"))]);
            guard.check_bearer(peer, &sent, at).err().map(|(status, _)| status.as_u16())
        };
        let right = "0123456789abcdef";
        for _ in 0..MAX_WRONG_TOKENS {
            assert_eq!(check(peer(1), "wrong", now), Some(403));
        }
        for _ in 0..10_000 {
            assert_eq!(check(peer(1), "wrong", now), Some(429));
        }
        assert_eq!(check(peer(1), right, now), Some(429));
        assert_eq!(check(peer(2), right, now), None);
        assert_eq!(check(peer(1), right, now + DECAY_INTERVAL), None);
        assert_eq!(check(peer(1), "wrong", now + DECAY_INTERVAL), Some(403));
        assert_eq!(check(peer(1), "wrong", now + DECAY_INTERVAL), Some(429));
        // All but the one in the log message.
        assert_eq!(guard.wrong.lock().unwrap().unlogged, u64::from(MAX_WRONG_TOKENS) + 10_000 + 2 + 1 - 1);
    }

    #[test]
    fn remembered_senders_are_bounded() {
        let (guard, now) = (guard(), Instant::now());
        for number in 0..10_000_u32 {
            let peer = HttpPeer::Address(IpAddr::from(number.to_be_bytes()));
            let sent = headers(&[(AUTHORIZATION, "Bearer wrong")]);
            let _ = guard.check_bearer(peer, &sent, now);
        }
        assert_eq!(guard.wrong.lock().unwrap().by_peer.len(), MAX_PEERS);
    }
}
