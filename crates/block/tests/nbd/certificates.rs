//! A certificate authority for one test: the directories that servers and clients read.

use openssl::asn1::Asn1Time;
use openssl::bn::{BigNum, MsbOption};
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::x509::extension::{BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAlternativeName};
use openssl::x509::{X509, X509Builder, X509NameBuilder};
use std::path::Path;

/// Signs certificates.
pub(crate) struct Authority {
    certificate: X509,
    key: PKey<Private>,
}

fn new_key() -> PKey<Private> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap()
}

fn builder(name: &str, key: &PKey<Private>) -> X509Builder {
    let mut subject = X509NameBuilder::new().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let mut serial = BigNum::new().unwrap();
    serial.rand(120, MsbOption::MAYBE_ZERO, false).unwrap();
    let mut builder = X509::builder().unwrap();
    builder.set_version(2).unwrap();
    builder.set_serial_number(&serial.to_asn1_integer().unwrap()).unwrap();
    builder.set_subject_name(&subject.build()).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
    builder.set_pubkey(key).unwrap();
    builder
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = new_key();
        let mut certificate = builder("test authority", &key);
        let name = builder("test authority", &key).build().subject_name().to_owned().unwrap();
        certificate.set_issuer_name(&name).unwrap();
        certificate.append_extension(BasicConstraints::new().critical().ca().build().unwrap()).unwrap();
        let usage = KeyUsage::new().critical().key_cert_sign().crl_sign().build().unwrap();
        certificate.append_extension(usage).unwrap();
        certificate.sign(&key, MessageDigest::sha256()).unwrap();
        Self { certificate: certificate.build(), key }
    }

    /// Writes ca-cert.pem, and certificate and key of `server` or `client`.
    pub(crate) fn issue(&self, directory: &Path, role: &str) {
        let key = new_key();
        let mut certificate = builder("localhost", &key);
        certificate.set_issuer_name(self.certificate.subject_name()).unwrap();
        certificate.append_extension(BasicConstraints::new().critical().build().unwrap()).unwrap();
        let usage = KeyUsage::new().critical().digital_signature().build().unwrap();
        certificate.append_extension(usage).unwrap();
        let purpose = match role {
            "server" => ExtendedKeyUsage::new().server_auth().build(),
            _ => ExtendedKeyUsage::new().client_auth().build(),
        };
        certificate.append_extension(purpose.unwrap()).unwrap();
        let context = certificate.x509v3_context(Some(&self.certificate), None);
        let name = SubjectAlternativeName::new().dns("localhost").ip("127.0.0.1").build(&context).unwrap();
        certificate.append_extension(name).unwrap();
        certificate.sign(&self.key, MessageDigest::sha256()).unwrap();
        let write = |name: String, pem: Vec<u8>| std::fs::write(directory.join(name), pem).unwrap();
        write("ca-cert.pem".to_owned(), self.certificate.to_pem().unwrap());
        write(format!("{role}-cert.pem"), certificate.build().to_pem().unwrap());
        write(format!("{role}-key.pem"), key.private_key_to_pem_pkcs8().unwrap());
    }
}
