//! Static files of the page, compiled into the program.
//!
//! A new file needs a line in [`ALL`]. Browsers cache the files and revalidate them by an entity
//! tag of the content.

use axum::{
    extract::Path,
    http::{
        HeaderMap, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH},
    },
    response::{IntoResponse, Response},
};

const HTML: &str = "text/html; charset=utf-8";

const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

/// Expands to the entries of files in the folder `page`.
macro_rules! files {
    ($($name:literal: $kind:expr),+ $(,)?) => {
        &[$(($name, $kind, include_bytes!(concat!("page/", $name)))),+]
    };
}

/// Name below `/assets/`, type and content.
const ALL: &[(&str, &str, &[u8])] = files![
    "api.js": JS,
    "axes.js": JS,
    "chart.js": JS,
    "detail.js": JS,
    "element.js": JS,
    "events.js": JS,
    "figures.js": JS,
    "history.js": JS,
    "icon.svg": SVG,
    "jobs.js": JS,
    "limits.js": JS,
    "live.js": JS,
    "main.js": JS,
    "store.js": JS,
    "style.css": CSS,
    "table.js": JS,
    "theme.js": JS,
    "token.js": JS,
    "tree.js": JS,
];

/// Content of `/`.
const INDEX: &[u8] = include_bytes!("page/index.html");

pub(super) async fn index(headers: HeaderMap) -> Response {
    answer(HTML, INDEX, &headers)
}

pub(super) async fn asset(Path(name): Path<String>, headers: HeaderMap) -> Response {
    match ALL.iter().find(|(known, ..)| *known == name) {
        Some((_, kind, content)) => answer(kind, content, &headers),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn answer(kind: &'static str, content: &'static [u8], headers: &HeaderMap) -> Response {
    let tag = format!("\"{:016x}\"", tag(content));
    let known = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    // If-None-Match may have a list (RFC 9110, section 13.1.2).
    let is_known = known.flat_map(|list| list.split(',')).any(|known| known.trim() == tag);
    let caching = [(CACHE_CONTROL, "no-cache".to_owned()), (ETAG, tag)];
    match is_known {
        true => (StatusCode::NOT_MODIFIED, caching).into_response(),
        false => (caching, [(CONTENT_TYPE, kind)], content).into_response(),
    }
}

/// FNV-1a: distinguishes versions of a file. Collisions are harmless.
fn tag(content: &[u8]) -> u64 {
    content
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |tag, byte| (tag ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_unique() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/page");
        for file in std::fs::read_dir(folder).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            let is_known = name == "index.html" || ALL.iter().any(|(known, ..)| *known == name);
            assert!(is_known, "{name} is in the directory and is not served");
        }
        for (index, (name, kind, content)) in ALL.iter().enumerate() {
            assert!(!content.is_empty() && kind.contains('/'), "{name}");
            assert!(ALL[..index].iter().all(|(other, ..)| other != name), "{name} is given twice");
        }
    }

    #[test]
    fn a_known_file_is_not_modified() {
        let mut headers = HeaderMap::new();
        let first = answer(HTML, INDEX, &headers);
        assert_eq!(first.status(), StatusCode::OK);
        headers.insert(IF_NONE_MATCH, first.headers()[ETAG].clone());
        assert_eq!(answer(HTML, INDEX, &headers).status(), StatusCode::NOT_MODIFIED);
        headers.insert(IF_NONE_MATCH, "\"0\", W/\"1\"".parse().unwrap());
        assert_eq!(answer(HTML, INDEX, &headers).status(), StatusCode::OK);
    }
}
