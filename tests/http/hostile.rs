//! Clients of the HTTP server that are slow, numerous, without the token or from another web page.

use std::env;

use super::*;
use crate::{harness::assert_contains, tls::CertificateAuthority};

#[test]
fn cross_origin_requests_are_rejected() {
    let scratch = Scratch::new();
    let daemon =
        HttpDaemon::start(Serve::new(&scratch).args(["memory:1M", "--http-name", "weir.example.org"]));
    let path = "/api/v1/overview";
    for host in ["evil.example.org", "weir.example.org.evil", ""] {
        let message = daemon.send("GET", path, &format!("Host: {host}\r\n"), "").error(421);
        assert!(message.contains("--http-name"), "{message}");
    }
    for host in ["weir.example.org", "localhost:1", "[::1]:9", "192.0.2.7"] {
        assert_eq!(daemon.send("GET", path, &format!("Host: {host}\r\n"), "").status, 200, "{host}");
    }
    let origin = |origin: &str| daemon.send("GET", path, &format!("Origin: {origin}\r\n"), "");
    assert_eq!(origin(&format!("http://{}", daemon.address)).status, 200);
    for other in ["http://evil.example.org", "null", "http://127.0.0.1:1"] {
        assert!(origin(other).error(403).contains("requests from other pages"), "{other}");
    }
}

#[test]
fn wrong_tokens_are_logged_once() {
    let scratch = Scratch::new();
    let daemon = HttpDaemon::with_token(&scratch, Serve::new(&scratch).arg("memory:1M"));
    let attempts = env::var("WEIR_WRONG_TOKENS").map_or(300, |text| text.parse().expect("a number"));
    let path = "/api/v1/disks/memory/limits";
    let mut stream = daemon.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut statuses = std::collections::BTreeMap::new();
    for number in 0..attempts {
        let request = format!(
            "PATCH {path} HTTP/1.1\r\n\
             Host: {}\r\n\
             Authorization: Bearer wrong{number}\r\n\
             Content-Length: 2\r\n\
             \r\n\
             {{}}",
            daemon.address
        );
        stream.write_all(request.as_bytes()).unwrap();
        let (mut status, mut length) = (String::new(), 0);
        reader.read_line(&mut status).unwrap();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        reader.read_exact(&mut vec![0; length]).unwrap();
        *statuses.entry(status.split(' ').nth(1).unwrap_or_default().to_owned()).or_insert(0) += 1;
    }
    // The first tokens are compared, later ones are rate-limited; a slow host permits one more a
    // second.
    assert!(statuses["403"] >= 10 && statuses["429"] > 0 && statuses.len() == 2, "{statuses:?}");
    daemon.weir.nbdsh("memory", "h.pread(512, 0)");
    let log = daemon.weir.stop();
    assert_eq!(log.matches("wrong token").count(), 1, "{log}");
}

#[test]
fn many_listeners_or_silent_clients_block_no_other() {
    let scratch = Scratch::new();
    let daemon = HttpDaemon::start(Serve::new(&scratch).args(["memory:1M", "--name", "disk"]));
    let mut first = daemon.listen();
    first.next("overview");
    let before = daemon.weir.resident_bytes();
    // They open the stream and do not read; some send only a part of the request.
    let idle: Vec<_> = (0..1000)
        .map(|number| {
            let mut stream = daemon.connect();
            let end = if number % 8 == 7 { "" } else { "\r\n\r\n" };
            // The connection may be closed already.
            let _ = write!(stream, "GET /api/v1/stream HTTP/1.1\r\nHost: localhost{end}");
            stream
        })
        .collect();
    // New clients are answered, and earlier listeners still receive events.
    let overview = daemon.overview();
    assert_eq!(entry_named(&overview, "disks", "disk")["size"], 1 << 20);
    daemon.weir.nbdsh("disk", "h.pread(512, 0)");
    while first.next("delta")["disks"][0]["reads"]["requests"] != 1 {}
    let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.weir.pid())).unwrap().count();
    assert!(descriptors < 500, "{descriptors} are open");
    let grown = daemon.weir.resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes for a thousand idle clients");
    drop(idle);
    daemon.weir.stop();
}

#[test]
fn streams_per_address_are_limited() {
    let scratch = Scratch::new();
    let daemon = HttpDaemon::start(Serve::new(&scratch).arg("memory:1M"));
    let mut streams: Vec<_> = (0..64).map(|_| daemon.listen()).collect();
    streams.iter_mut().for_each(|stream| drop(stream.next("overview")));
    let message = daemon.get("/api/v1/stream").error(429);
    assert!(message.starts_with("weir: 64 pages are open from your address"), "{message}");
    // All loopback addresses of this host count as one; closing a stream makes room.
    let url = format!("http://{}/api/v1/stream", daemon.address);
    let head = ["--silent", "--show-error", "--fail", "--head", "--interface", "127.0.0.2", &url];
    assert_contains(&TestClient::new("curl").args(head).fails(), &["429"]);
    streams.pop();
    poll_until(|| {
        let mut stream = daemon.connect();
        let request = format!("GET /api/v1/stream HTTP/1.1\r\nHost: {}\r\n\r\n", daemon.address);
        stream.write_all(request.as_bytes()).unwrap();
        let mut status = String::new();
        BufReader::new(stream).read_line(&mut status).unwrap();
        status.contains(" 200 ").then_some(())
    });
    daemon.weir.stop();
}

#[test]
fn endless_head_or_body_is_disconnected() {
    let scratch = Scratch::new();
    let daemon = HttpDaemon::with_token(&scratch, Serve::new(&scratch).arg("memory:1M"));
    let mut endless = daemon.connect();
    // Far more than the sockets buffer while the daemon does not run.
    assert!(
        (0..1000).any(|_| endless.write_all(&[b'x'; 64 << 10]).is_err()),
        "the daemon received 64 MB without rejecting them"
    );
    // Both in parallel, because each takes ten seconds.
    let half = |request: String| {
        let mut stream = daemon.connect();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    let mut heads = half("GET / HTTP/1.1\r\nHost: local".to_owned());
    let mut bodies = half(format!(
        "PATCH /api/v1/disks/memory/limits HTTP/1.1\r\n\
         Host: localhost\r\n\
         Authorization: Bearer {TOKEN}\r\n\
         Content-Length: 9\r\n\
         \r\n\
         {{"
    ));
    let mut response = String::new();
    bodies.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 408 "), "{response}");
    let mut rest = Vec::new();
    heads.read_to_end(&mut rest).unwrap();
    daemon.overview();
}

#[test]
fn tokens_require_a_loopback_address_and_a_private_file() {
    let scratch = Scratch::new();
    let token = token_file(&scratch);
    let serve = || Serve::new(&scratch).arg("memory:1M");
    let stderr = serve().args(["--http", "0.0.0.0:0", "--http-token-file", text(&token)]).rejects_usage();
    assert!(stderr.contains("would be sent over the network in plain text to 0.0.0.0:0"), "{stderr}");
    let weir = serve().args(["--http", "0.0.0.0:0"]).start();
    weir.wait_for_log("others on the network can read names and activity of disks");
    weir.stop();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o644)).unwrap();
    let stderr = serve().args(["--http", "127.0.0.1:0", "--http-token-file", text(&token)]).fails();
    assert!(stderr.contains("mode 0644 makes it accessible to others (chmod 600"), "{stderr}");
    let stderr = serve().args(["--http-token-file", text(&token)]).rejects_usage();
    assert!(stderr.contains("there is no page (set http too)"), "{stderr}");
}

#[test]
fn https_uses_the_certificates_of_nbd() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let serve =
        Serve::new(&scratch).args(["memory:1M", "--tls", "on", "--tls-certificates", authority.path()]);
    let daemon = HttpDaemon::with_token(&scratch, serve);
    let port = daemon.address.rsplit(':').next().unwrap();
    let url = format!("https://localhost:{port}/api/v1/overview");
    let certificate = format!("{}/ca-cert.pem", authority.path());
    let overview = TestClient::new("curl")
        .args(["--silent", "--show-error", "--fail", "--cacert", &certificate, &url])
        .json();
    assert_eq!(entry_named(&overview, "disks", "memory")["size"], 1 << 20);
    // A plain-text client is not answered.
    let mut stream = daemon.connect();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(!rest.starts_with(b"HTTP"), "{rest:?}");
    daemon.weir.stop();
}
