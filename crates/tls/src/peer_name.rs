//! Name that a client proved by TLS: the subject of its certificate, or the user of its pre-shared
//! key.
//!
//! A subject has the form that QEMU's `authz-simple` compares: the attributes in the order of the
//! certificate, such as `C=GB,O=Acme\, Inc,CN=vm1`, with special characters escaped by RFC 4514
//! section 2.4. Never decides whether a name is allowed: `policy::access` does.

use std::{fmt::Write as _, sync::LazyLock};

use openssl::{
    error::ErrorStack,
    ex_data::Index,
    ssl::{Ssl, SslRef},
    x509::{X509NameEntryRef, X509NameRef},
};

// Index of the pre-shared key's user in the data of a connection (`SSL_get_ex_new_index`), one for
// the whole process.
static USER: LazyLock<Result<Index<Ssl, Vec<u8>>, ErrorStack>> = LazyLock::new(Ssl::new_ex_index);

pub(crate) fn index_of_user() -> Result<Index<Ssl, Vec<u8>>, ErrorStack> {
    USER.clone()
}

/// Name of the peer, once the handshake is complete. A user that is not UTF-8 has no name, because
/// no access rule can match it.
pub fn peer_name(ssl: &SslRef) -> Option<String> {
    if let Some(user) = index_of_user().ok().and_then(|index| ssl.ex_data(index)) {
        return String::from_utf8(user.clone()).ok();
    }
    // A server requests a certificate only if it verifies it, so this subject is proven.
    ssl.peer_certificate().map(|certificate| subject(certificate.subject_name()))
}

fn subject(name: &X509NameRef) -> String {
    let parts: Vec<_> = name.entries().map(|part| format!("{}={}", kind(part), value(part))).collect();
    parts.join(",")
}

/// Attribute type by GnuTLS's name, where that differs from OpenSSL's: QEMU uses GnuTLS.
fn kind(part: &X509NameEntryRef) -> String {
    match part.object().nid().short_name() {
        Ok("emailAddress") => "EMAIL".to_owned(),
        Ok("street") => "STREET".to_owned(),
        Ok(known) if known != "UNDEF" => known.to_owned(),
        _ => part.object().to_string(),
    }
}

fn value(part: &X509NameEntryRef) -> String {
    match part.data().to_string() {
        Ok(text) => escaped(&text),
        // RFC 4514 section 2.4: a value without a string form is `#` and its bytes in hexadecimal.
        Err(_) => part.data().as_slice().iter().fold("#".to_owned(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        }),
    }
}

fn escaped(text: &str) -> String {
    let last = text.chars().count().saturating_sub(1);
    let mut written = String::new();
    // RFC 4514 section 2.4: NUL is always escaped, a space at both ends only, `#` at the start
    // only.
    for (at, character) in text.chars().enumerate() {
        match character {
            '\0' => {
                written.push_str("\\00");
                continue;
            }
            '"' | '+' | ',' | ';' | '<' | '>' | '\\' => written.push('\\'),
            ' ' if at == 0 || at == last => written.push('\\'),
            '#' if at == 0 => written.push('\\'),
            _ => {}
        }
        written.push(character);
    }
    written
}

#[cfg(test)]
mod tests {
    use openssl::{nid::Nid, x509::X509NameBuilder};

    use super::*;

    #[test]
    fn subject_keeps_attribute_order_and_is_escaped() {
        let mut name = X509NameBuilder::new().unwrap();
        for (nid, text) in [
            (Nid::COUNTRYNAME, "GB"),
            (Nid::ORGANIZATIONNAME, "Acme, Inc+x"),
            (Nid::COMMONNAME, " #vm é\\ "),
            (Nid::PKCS9_EMAILADDRESS, "a@b"),
        ] {
            name.append_entry_by_nid(nid, text).unwrap();
        }
        let expect = "C=GB,O=Acme\\, Inc\\+x,CN=\\ #vm é\\\\\\ ,EMAIL=a@b";
        assert_eq!(subject(&name.build()), expect);
        assert_eq!(escaped("#1\0"), "\\#1\\00");
    }
}
