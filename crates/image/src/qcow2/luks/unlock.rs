//! Derives a [`SectorCipher`] from a passphrase; creates the LUKS area of a new image, with a
//! random master key and one active slot.
//!
//! Key derivation is slow by design and therefore runs on another thread. The header's limits
//! bound its time.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use openssl::{error::ErrorStack, pkcs5::pbkdf2_hmac, rand::rand_bytes};
use zeroize::Zeroizing;

use super::{
    anti_forensic,
    cipher::{CipherKind, SectorCipher},
    header::{HEADER_BYTES, KeySlot, LuksHash, LuksHeader, MAX_ITERATIONS, SLOTS, STRIPES},
};
use reactor::{buffer::IoBuffer, error::Error};
use storage::Storage;

use crate::{
    Secret,
    qcow2::{InvalidImage, header::FileRegion},
};

// Minimum of iterations, from the specification.
const MIN_ITERATIONS: u32 = 1000;
// The digest has an eighth of a slot's iterations: it is computed for each slot that is tried.
const DIGEST_SHARE: u32 = 8;

/// Reason why an image cannot be unlocked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnlockError {
    /// The LUKS header is invalid or not supported.
    #[error(transparent)]
    Invalid(#[from] InvalidImage),
    /// The LUKS header cannot be read.
    #[error("the LUKS header cannot be read: {0}")]
    Io(#[from] Error),
    /// The passphrase opens no key slot.
    #[error("the passphrase does not unlock any of its {slots} key slots")]
    WrongPassphrase {
        /// Number of active slots.
        slots: usize,
    },
}

/// Encryption options of a new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LuksOptions {
    /// Cipher of guest data and key slots.
    pub cipher: CipherKind,
    /// Hash of key derivation.
    pub hash: LuksHash,
    /// Target duration of a key derivation on this machine.
    pub iteration_time: Duration,
}

impl Default for LuksOptions {
    /// QEMU's defaults: AES-256-XTS, SHA-256, two seconds.
    fn default() -> Self {
        Self { cipher: CipherKind::DEFAULT, hash: LuksHash::Sha256, iteration_time: Duration::from_secs(2) }
    }
}

/// Result of [`create`].
#[derive(Debug)]
pub struct NewLuks {
    /// LUKS header and all key slots, to be written at the location that the image's header names.
    pub area: Vec<u8>,
    /// Cipher of guest data.
    pub cipher: SectorCipher,
}

impl NewLuks {
    /// Length of `area` for a cipher, without deriving a key.
    pub fn area_bytes(cipher: CipherKind) -> u64 {
        LuksHeader::slot_offset(cipher, SLOTS)
    }
}

/// Reads the LUKS header at `place` of an image.
///
/// # Errors
/// [`UnlockError::Invalid`] and [`UnlockError::Io`].
pub async fn read_header(storage: &Storage, place: FileRegion) -> Result<LuksHeader, UnlockError> {
    let end = place.offset.checked_add(place.length);
    if end.is_none_or(|end| end > storage.size_bytes()) {
        return Err(InvalidImage::new(format!(
            "the LUKS header at {:#x} ends beyond the end of the file",
            place.offset
        ))
        .into());
    }
    if place.length < HEADER_BYTES as u64 {
        return Err(InvalidImage::new(format!(
            "the LUKS header has {} bytes; the minimum is {HEADER_BYTES}",
            place.length
        ))
        .into());
    }
    let bytes = storage.read(place.offset, IoBuffer::new(HEADER_BYTES)).await?;
    Ok(LuksHeader::parse(&bytes, place.length)?)
}

/// Unlocks the image whose LUKS header is at `place`: tries `passphrase` on each active slot.
///
/// # Errors
/// [`UnlockError`].
pub async fn unlock(
    storage: &Storage,
    place: FileRegion,
    passphrase: &Secret,
) -> Result<SectorCipher, UnlockError> {
    let header = read_header(storage, place).await?;
    let mut slots = 0;
    for slot in header.slots.iter().filter(|slot| slot.active) {
        slots += 1;
        let material =
            storage.read(place.offset + slot.offset, IoBuffer::new(header.material_bytes())).await?;
        let (header, slot, passphrase) = (header.clone(), slot.clone(), passphrase.clone());
        // The stripes are copied into memory that is wiped after use.
        let mut material = Zeroizing::new(material.to_vec());
        let opened =
            reactor::run_computation(move || try_slot(&header, &slot, &mut material, &passphrase)).await?;
        if let Some(cipher) = opened {
            return Ok(cipher);
        }
    }
    Err(UnlockError::WrongPassphrase { slots })
}

/// Returns the cipher with the master key if the passphrase opens this slot. `material` is the
/// slot's stripes, which are decrypted in place.
fn try_slot(
    header: &LuksHeader,
    slot: &KeySlot,
    material: &mut [u8],
    passphrase: &Secret,
) -> Result<Option<SectorCipher>, InvalidImage> {
    let key = derive(header.hash, passphrase.expose(), &slot.salt, slot.iterations, header.cipher.key_bytes)?;
    let decrypted = SectorCipher::new(header.cipher, &key)?.decrypt(0, material);
    decrypted.map_err(|error| InvalidImage::new(format!("a key slot cannot be decrypted: {error}")))?;
    let master =
        anti_forensic::merge(material, slot.stripes as usize, header.hash.digest()).map_err(failed)?;
    let digest =
        derive(header.hash, &master, &header.digest_salt, header.digest_iterations, header.digest.len())?;
    // Constant time: the digest verifies the master key.
    if openssl::memcmp::eq(&digest, &header.digest) {
        SectorCipher::new(header.cipher, &master).map(Some)
    } else {
        Ok(None)
    }
}

/// Creates a master key and the LUKS area of a new image for `passphrase`. Blocks for
/// [`iteration_time`](LuksOptions::iteration_time), and in addition for the digest, up to an eighth
/// of it, and the measurement of the machine.
pub fn create(passphrase: &Secret, options: &LuksOptions) -> Result<NewLuks, InvalidImage> {
    let LuksOptions { cipher: kind, hash, iteration_time } = *options;
    let iterations = iterations_for(hash, kind.key_bytes, iteration_time)?;
    let mut master = Zeroizing::new(vec![0; kind.key_bytes]);
    rand_bytes(&mut master).map_err(failed)?;
    let slot = |index| KeySlot {
        active: false,
        iterations: 0,
        salt: [0; 32],
        offset: LuksHeader::slot_offset(kind, index),
        stripes: STRIPES,
    };
    let mut header = LuksHeader {
        cipher: kind,
        hash,
        payload_offset: NewLuks::area_bytes(kind),
        digest: [0; 20],
        digest_salt: random()?,
        digest_iterations: (iterations / DIGEST_SHARE).max(MIN_ITERATIONS),
        uuid: new_uuid()?,
        slots: std::array::from_fn(slot),
    };
    let digest = derive(hash, &master, &header.digest_salt, header.digest_iterations, header.digest.len())?;
    header.digest.copy_from_slice(&digest);
    let salt = random()?;
    header.slots[0] = KeySlot { active: true, iterations, salt, ..slot(0) };
    let key = derive(hash, passphrase.expose(), &salt, iterations, kind.key_bytes)?;
    let mut material = anti_forensic::split(&master, STRIPES as usize, hash.digest()).map_err(failed)?;
    let encrypted = SectorCipher::new(kind, &key)?.encrypt(0, &mut material);
    encrypted.map_err(|error| InvalidImage::new(format!("a key slot cannot be encrypted: {error}")))?;
    let mut area = vec![0; NewLuks::area_bytes(kind) as usize];
    area[..HEADER_BYTES].copy_from_slice(&header.encode());
    let at = header.slots[0].offset as usize;
    area[at..at + material.len()].copy_from_slice(&material);
    Ok(NewLuks { area, cipher: SectorCipher::new(kind, &master)? })
}

fn derive(
    hash: LuksHash,
    secret: &[u8],
    salt: &[u8],
    iterations: u32,
    length: usize,
) -> Result<Zeroizing<Vec<u8>>, InvalidImage> {
    let mut key = Zeroizing::new(vec![0; length]);
    pbkdf2_hmac(secret, salt, iterations as usize, hash.digest(), &mut key).map_err(|error| {
        InvalidImage::new(format!("a key cannot be derived with {}: {error}", hash.name()))
    })?;
    Ok(key)
}

/// Number of iterations that take `time` on this thread. Measured with increasing numbers until
/// the clock is precise enough.
fn iterations_for(hash: LuksHash, key_bytes: usize, time: Duration) -> Result<u32, InvalidImage> {
    const LONG_ENOUGH: Duration = Duration::from_millis(50);
    if time.is_zero() {
        return Ok(MIN_ITERATIONS);
    }
    let mut iterations = MIN_ITERATIONS;
    loop {
        let started = processor_time()?;
        derive(hash, b"measured", &[0; 32], iterations, key_bytes)?;
        let elapsed = processor_time()?.saturating_sub(started);
        if elapsed >= LONG_ENOUGH || iterations >= MAX_ITERATIONS {
            let scaled = f64::from(iterations) * time.as_secs_f64() / elapsed.max(LONG_ENOUGH).as_secs_f64();
            // The conversion saturates if the float is out of range.
            return Ok((scaled as u32).clamp(MIN_ITERATIONS, MAX_ITERATIONS));
        }
        iterations = iterations.saturating_mul(2);
    }
}

/// CPU time of this thread: wall-clock time would yield weaker keys on a busy machine.
fn processor_time() -> Result<Duration, InvalidImage> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map(Duration::from)
        .map_err(|errno| InvalidImage::new(format!("the processor time cannot be read: {errno}")))
}

fn random<const N: usize>() -> Result<[u8; N], InvalidImage> {
    let mut bytes = [0; N];
    rand_bytes(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Random UUID, version 4 of RFC 9562.
fn new_uuid() -> Result<String, InvalidImage> {
    let number = u128::from_be_bytes(random()?);
    let number = number & !(0xf << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{number:032x}");
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}

fn failed(error: ErrorStack) -> InvalidImage {
    InvalidImage::new(format!("openssl failed: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::qcow2::{big_endian::u64_at, entry::EntryFormat, entry::L1Entry, header::Qcow2Header};
    use reactor::sim;

    const QUICK: LuksOptions =
        LuksOptions { cipher: CipherKind::DEFAULT, hash: LuksHash::Sha256, iteration_time: Duration::ZERO };

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes().to_vec())
    }

    fn place(area: &[u8]) -> FileRegion {
        FileRegion { offset: 0, length: area.len() as u64 }
    }

    #[test]
    fn volume_unlocks_with_its_passphrase_only() {
        for (mode, key_bytes, hash) in [
            ("xts-plain64", 64, LuksHash::Sha256),
            ("xts-plain64", 32, LuksHash::Sha1),
            ("cbc-essiv:sha256", 32, LuksHash::Sha512),
        ] {
            let cipher = CipherKind::parse("aes", mode, key_bytes).expect("supported");
            let new = create(&secret("geheim"), &LuksOptions { cipher, hash, ..QUICK }).expect("made");
            sim::run(1, async move {
                let storage = Storage::with_content(&new.area).await;
                let place = place(&new.area);
                let wrong = unlock(&storage, place, &secret("Geheim")).await.expect_err("wrong");
                assert_eq!(wrong, UnlockError::WrongPassphrase { slots: 1 });
                let cipher = unlock(&storage, place, &secret("geheim")).await.expect("right");
                let mut data = vec![5; 1024];
                new.cipher.encrypt(9, &mut data).expect("whole sectors");
                cipher.decrypt(9, &mut data).expect("whole sectors");
                assert_eq!(data, [5; 1024]);
            });
        }
    }

    #[test]
    fn key_derivation_is_slow() {
        let options = LuksOptions { iteration_time: Duration::from_millis(200), ..QUICK };
        let new = create(&secret("geheim"), &options).expect("made");
        let header = LuksHeader::parse(&new.area, new.area.len() as u64).expect("valid");
        assert!(header.slots[0].iterations > 5_000, "{}", header.slots[0].iterations);
        let quick = create(&secret("geheim"), &QUICK).expect("made");
        let header = LuksHeader::parse(&quick.area, quick.area.len() as u64).expect("valid");
        assert_eq!((header.slots[0].iterations, header.digest_iterations), (1000, 1000));
    }

    #[test]
    fn a_header_outside_the_file_is_refused() {
        sim::run(1, async {
            let storage = Storage::with_content(&[0; 4096]).await;
            for (offset, length) in [(0, 8192), (u64::MAX, 2), (4096, 592), (0, 591)] {
                let error = read_header(&storage, FileRegion { offset, length }).await.expect_err("outside");
                assert!(matches!(error, UnlockError::Invalid(_)), "{error}");
            }
        });
    }

    /// An image encrypted by QEMU: see `samples/README.md`.
    fn encrypted_by_qemu(sample: &[u8]) -> (Vec<u8>, Qcow2Header) {
        let mut file = Vec::new();
        flate2::read::GzDecoder::new(sample).read_to_end(&mut file).expect("a sample of gzip");
        let header = Qcow2Header::parse(&file).expect("valid");
        (file, header)
    }

    /// Offset of the first guest cluster.
    fn first_cluster(file: &[u8], header: &Qcow2Header) -> usize {
        let shape = EntryFormat { cluster_bits: 12, extended: false, data_file: false, version: 3 };
        let number = |at: u64| u64_at(file, at as usize);
        let table = L1Entry::decode(number(header.l1_offset), shape).expect("valid").offset;
        (number(table) & 0x00ff_ffff_ffff_fe00) as usize
    }

    #[test]
    fn decrypts_images_of_qemu() {
        for (name, sample) in [
            ("aes-256-xts", &include_bytes!("samples/aes-256-xts-sha256.qcow2.gz")[..]),
            ("aes-128-xts", include_bytes!("samples/aes-128-xts-sha1.qcow2.gz")),
            ("aes-256-cbc-essiv", include_bytes!("samples/aes-256-cbc-essiv-sha256.qcow2.gz")),
            ("aes-256-cbc-plain", include_bytes!("samples/aes-256-cbc-plain-ripemd160.qcow2.gz")),
        ] {
            let (file, header) = encrypted_by_qemu(sample);
            let at = first_cluster(&file, &header);
            let place = header.encryption.expect("encrypted");
            sim::run(1, async move {
                let storage = Storage::with_content(&file).await;
                let cipher = unlock(&storage, place, &secret("geheim")).await.expect("unlocks");
                assert_eq!(NewLuks::area_bytes(cipher.kind()), place.length, "{name}");
                let mut cluster = file[at..at + 4096].to_vec();
                assert_ne!(cluster, [0x5a; 4096], "{name}");
                cipher.decrypt(at as u64 / 512, &mut cluster).expect("whole sectors");
                assert_eq!(cluster, [0x5a; 4096], "{name}");
            });
        }
    }
}
