//! The LUKS header: 592 bytes, decoded to [`LuksHeader`] and encoded from it.
//!
//! All values are untrusted, and some determine costs: iterations cost time, stripes and key sizes
//! cost memory. They are bounded here, so that callers need no further checks.
//!
//! Source: "LUKS On-Disk Format Specification" 1.2.3, figures 1 to 4.

use std::ops::Range;

use openssl::hash::MessageDigest;

use super::{
    super::{
        InvalidImage,
        big_endian::{array, u16_at, u32_at},
    },
    cipher::{CipherKind, SECTOR_BYTES},
};

/// Encoded size of the header.
pub const HEADER_BYTES: usize = 592;
/// Number of key slots, used or not.
pub const SLOTS: usize = 8;
/// Limit of PBKDF2 iterations for a key slot or the digest: 30 s on a slow core. QEMU and
/// cryptsetup spend two seconds on a new slot, which is about three million on a fast core.
pub const MAX_ITERATIONS: u32 = 1 << 25;

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const VERSION: u16 = 1;
const ENABLED: u32 = 0x00ac_71f3;
const DISABLED: u32 = 0x0000_dead;
// Fixed by the specification.
pub(super) const STRIPES: u32 = 4000;
// Alignment of the key slots that weir creates.
const SLOT_ALIGNMENT: u64 = 4096;

const FIRST_SLOT: usize = 208;
const SLOT_BYTES: usize = 48;

/// Hash function of key derivation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LuksHash {
    /// SHA-1, the first of the format.
    Sha1,
    /// SHA-224.
    Sha224,
    /// SHA-256, QEMU's default.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
    /// RIPEMD-160.
    Ripemd160,
}

impl LuksHash {
    const ALL: [Self; 6] =
        [Self::Sha1, Self::Sha224, Self::Sha256, Self::Sha384, Self::Sha512, Self::Ripemd160];

    /// Parses the name in the header.
    ///
    /// # Errors
    /// The name is not supported.
    pub fn parse(name: &str) -> Result<Self, InvalidImage> {
        Self::ALL.into_iter().find(|hash| hash.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            InvalidImage::new(format!("the hash {name:?} is not supported; {known} are"))
        })
    }

    /// Name in the header.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha224 => "sha224",
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
            Self::Ripemd160 => "ripemd160",
        }
    }

    pub(super) fn digest(self) -> MessageDigest {
        match self {
            Self::Sha1 => MessageDigest::sha1(),
            Self::Sha224 => MessageDigest::sha224(),
            Self::Sha256 => MessageDigest::sha256(),
            Self::Sha384 => MessageDigest::sha384(),
            Self::Sha512 => MessageDigest::sha512(),
            Self::Ripemd160 => MessageDigest::ripemd160(),
        }
    }
}

/// A key slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySlot {
    /// True if the slot contains the master key, encrypted with a passphrase. Otherwise only its
    /// offset is meaningful.
    pub active: bool,
    /// PBKDF2 iterations; 1 to [`MAX_ITERATIONS`] if active.
    pub iterations: u32,
    /// Salt of the passphrase.
    pub salt: [u8; 32],
    /// Offset of its stripes in bytes, relative to the LUKS header; a multiple of 512.
    pub offset: u64,
    /// Number of stripes; 4000 if active.
    pub stripes: u32,
}

/// Decoded header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksHeader {
    /// Cipher of guest data and key slots.
    pub cipher: CipherKind,
    /// Hash of PBKDF2 and the stripes.
    pub hash: LuksHash,
    /// Offset of the data in bytes on a plain LUKS disk; unused inside qcow2.
    pub payload_offset: u64,
    /// Digest that verifies the master key.
    pub digest: [u8; 20],
    /// Salt of the digest.
    pub digest_salt: [u8; 32],
    /// PBKDF2 iterations of the digest; 1 to [`MAX_ITERATIONS`].
    pub digest_iterations: u32,
    /// UUID as text.
    pub uuid: String,
    /// All key slots.
    pub slots: [KeySlot; SLOTS],
}

/// Checks that all key slots lie inside the header's area, used or not, and even if the cipher is
/// not supported.
///
/// # Errors
/// The first fault: `bytes` is not a LUKS header, or a slot ends beyond `area_bytes`.
pub fn check_slots(bytes: &[u8], area_bytes: u64) -> Result<(), InvalidImage> {
    let Some(bytes) = bytes.get(..HEADER_BYTES).filter(|bytes| bytes.starts_with(&MAGIC)) else {
        return Err(InvalidImage::new("the LUKS header has no signature"));
    };
    for slot in 0..SLOTS {
        let end = slot_place(bytes, slot).end;
        if end > area_bytes {
            return Err(InvalidImage::new(format!(
                "key slot {slot} ends at {end:#x}, beyond the end of the LUKS header ({area_bytes:#x})"
            )));
        }
    }
    Ok(())
}

/// Range of a key slot's stripes in bytes, relative to the LUKS header. An end beyond 64 bits
/// becomes `u64::MAX`, which is outside every area.
fn slot_place(bytes: &[u8], slot: usize) -> Range<u64> {
    let at = FIRST_SLOT + slot * SLOT_BYTES;
    let offset = u64::from(u32_at(bytes, at + 40)) * SECTOR_BYTES as u64;
    let key_bytes = u64::from(u32_at(bytes, 108));
    // The product of two 32-bit numbers fits into 64 bits; the sum with the offset may not.
    offset..offset.saturating_add(key_bytes * u64::from(u32_at(bytes, at + 44)))
}

impl LuksHeader {
    /// Decodes and checks the header from its [`HEADER_BYTES`]. `area_bytes` is the size of header
    /// and key slots together.
    ///
    /// # Errors
    /// The violated rule or the unsupported value.
    pub fn parse(bytes: &[u8], area_bytes: u64) -> Result<Self, InvalidImage> {
        let Some(bytes) = bytes.get(..HEADER_BYTES) else {
            return Err(InvalidImage::new("the LUKS header is truncated"));
        };
        if bytes[..6] != MAGIC {
            return Err(InvalidImage::new("the LUKS header has no signature"));
        }
        let version = u16_at(bytes, 6);
        if version != VERSION {
            return Err(InvalidImage::new(format!(
                "version {version} of LUKS is not supported inside qcow2; 1 is"
            )));
        }
        let cipher = CipherKind::parse(
            text(&bytes[8..40], "the cipher's name")?,
            text(&bytes[40..72], "the cipher mode's name")?,
            u32_at(bytes, 108),
        )?;
        let header = Self {
            cipher,
            hash: LuksHash::parse(text(&bytes[72..104], "the hash's name")?)?,
            payload_offset: u64::from(u32_at(bytes, 104)) * SECTOR_BYTES as u64,
            digest: array(bytes, 112),
            digest_salt: array(bytes, 132),
            digest_iterations: u32_at(bytes, 164),
            uuid: text(&bytes[168..208], "the UUID")?.to_owned(),
            slots: slots(bytes)?,
        };
        header.check(bytes)?;
        check_slots(bytes, area_bytes)?;
        Ok(header)
    }

    fn check(&self, bytes: &[u8]) -> Result<(), InvalidImage> {
        iterations("the master key's digest", self.digest_iterations)?;
        // Overlapping slots would damage each other when one is changed.
        let mut taken = vec![("header".to_owned(), 0..HEADER_BYTES as u64)];
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.active) {
            iterations(&format!("key slot {index}"), slot.iterations)?;
            if slot.stripes != STRIPES {
                return Err(InvalidImage::new(format!(
                    "key slot {index} has {} stripes; only {STRIPES} is valid",
                    slot.stripes
                )));
            }
            let place = slot_place(bytes, index);
            let overlapped =
                taken.iter().find(|(_, other)| place.start < other.end && other.start < place.end);
            if let Some((other, _)) = overlapped {
                return Err(InvalidImage::new(format!("key slot {index} overlaps with the LUKS {other}")));
            }
            taken.push((format!("key slot {index}"), place));
        }
        Ok(())
    }

    /// Size of a key slot's stripes in bytes.
    pub fn material_bytes(&self) -> usize {
        self.cipher.key_bytes * STRIPES as usize
    }

    /// Offset of a key slot in a new image; for [`SLOTS`] the size of the area.
    pub(super) fn slot_offset(cipher: CipherKind, slot: usize) -> u64 {
        let material = (cipher.key_bytes * STRIPES as usize) as u64;
        SLOT_ALIGNMENT + slot as u64 * material.next_multiple_of(SLOT_ALIGNMENT)
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut write_at = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        write_at(0, &MAGIC);
        write_at(6, &VERSION.to_be_bytes());
        write_at(8, self.cipher.cipher_name().as_bytes());
        write_at(40, self.cipher.mode_name().as_bytes());
        write_at(72, self.hash.name().as_bytes());
        write_at(104, &sectors(self.payload_offset));
        write_at(108, &(self.cipher.key_bytes as u32).to_be_bytes());
        write_at(112, &self.digest);
        write_at(132, &self.digest_salt);
        write_at(164, &self.digest_iterations.to_be_bytes());
        write_at(168, &self.uuid.as_bytes()[..self.uuid.len().min(39)]);
        for (index, slot) in self.slots.iter().enumerate() {
            let at = FIRST_SLOT + index * SLOT_BYTES;
            write_at(at, &if slot.active { ENABLED } else { DISABLED }.to_be_bytes());
            write_at(at + 4, &slot.iterations.to_be_bytes());
            write_at(at + 8, &slot.salt);
            write_at(at + 40, &sectors(slot.offset));
            write_at(at + 44, &slot.stripes.to_be_bytes());
        }
        bytes
    }
}

fn slots(bytes: &[u8]) -> Result<[KeySlot; SLOTS], InvalidImage> {
    let mut slots = Vec::with_capacity(SLOTS);
    for index in 0..SLOTS {
        let at = FIRST_SLOT + index * SLOT_BYTES;
        let active = match u32_at(bytes, at) {
            ENABLED => true,
            DISABLED => false,
            other => {
                return Err(InvalidImage::new(format!("key slot {index} has the invalid state {other:#x}")));
            }
        };
        slots.push(KeySlot {
            active,
            iterations: u32_at(bytes, at + 4),
            salt: array(bytes, at + 8),
            offset: u64::from(u32_at(bytes, at + 40)) * SECTOR_BYTES as u64,
            stripes: u32_at(bytes, at + 44),
        });
    }
    slots.try_into().map_err(|_| InvalidImage::new("the LUKS header is truncated"))
}

fn iterations(label: &str, count: u32) -> Result<(), InvalidImage> {
    if (1..=MAX_ITERATIONS).contains(&count) {
        return Ok(());
    }
    Err(InvalidImage::new(format!("{label} has {count} iterations; 1 to {MAX_ITERATIONS} is valid")))
}

fn sectors(bytes: u64) -> [u8; 4] {
    ((bytes / SECTOR_BYTES as u64) as u32).to_be_bytes()
}

/// Text of a field, up to the first zero.
fn text<'a>(field: &'a [u8], label: &str) -> Result<&'a str, InvalidImage> {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end])
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
    text.ok_or_else(|| InvalidImage::new(format!("{label} in the LUKS header is not printable ASCII")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AREA: u64 = 2_068_480;

    fn header() -> LuksHeader {
        let slot = |index: usize| KeySlot {
            active: index == 0 || index == 7,
            iterations: 1000 + index as u32,
            salt: [index as u8; 32],
            offset: LuksHeader::slot_offset(CipherKind::DEFAULT, index),
            stripes: STRIPES,
        };
        LuksHeader {
            cipher: CipherKind::DEFAULT,
            hash: LuksHash::Sha256,
            payload_offset: AREA,
            digest: [1; 20],
            digest_salt: [2; 32],
            digest_iterations: 1000,
            uuid: "61de5bdd-655b-4a99-913c-d89d2b349e3f".to_owned(),
            slots: std::array::from_fn(slot),
        }
    }

    #[test]
    fn luks_header_round_trips() {
        assert_eq!(LuksHeader::slot_offset(CipherKind::DEFAULT, SLOTS), AREA);
        assert_eq!(LuksHeader::parse(&header().encode(), AREA), Ok(header()));
    }

    #[test]
    fn invalid_luks_headers_are_rejected() {
        type Change = fn(&mut [u8]);
        let cases: [(&str, Change); 12] = [
            ("signature", |bytes| bytes[0] = 0),
            ("version 2", |bytes| bytes[7] = 2),
            ("\"bes\"", |bytes| bytes[8] = b'b'),
            ("\"yts-plain64\"", |bytes| bytes[40] = b'y'),
            ("\"tha256\"", |bytes| bytes[72] = b't'),
            ("keys of 320 bytes", |bytes| bytes[110] = 1),
            ("digest has 4278191080 iterations", |bytes| bytes[164] = 0xff),
            ("slot 0 has", |bytes| bytes[212] = 0xff),
            ("slot 1 has the invalid state", |bytes| bytes[256] = 1),
            ("slot 0 ends at", |bytes| bytes[248] = 1),
            ("slot 0 overlaps with the LUKS header", |bytes| bytes[251] = 0),
            ("stripes", |bytes| bytes[252] = 0xff),
        ];
        for (part, change) in cases {
            let mut bytes = header().encode();
            change(&mut bytes);
            let message = LuksHeader::parse(&bytes, AREA).expect_err(part).to_string();
            assert!(message.contains(part), "{message}");
        }
        let overlapping =
            LuksHeader { slots: header().slots.map(|slot| KeySlot { offset: 4096, ..slot }), ..header() };
        let message = LuksHeader::parse(&overlapping.encode(), AREA).expect_err("overlap").to_string();
        assert_eq!(message, "key slot 7 overlaps with the LUKS key slot 0");
        assert!(LuksHeader::parse(&header().encode()[..591], AREA).is_err());
        assert!(LuksHeader::parse(&header().encode(), AREA / 2).is_err());
    }

    #[test]
    fn an_end_of_a_key_slot_beyond_64_bits_is_refused() {
        let mut bytes = header().encode();
        let at = FIRST_SLOT + 3 * SLOT_BYTES;
        for field in [108, at + 40, at + 44] {
            bytes[field..field + 4].fill(0xff);
        }
        // Slots without stripes have length 0, so that only slot 3 exceeds the area.
        for slot in (0..SLOTS).filter(|&slot| slot != 3) {
            let at = FIRST_SLOT + slot * SLOT_BYTES;
            bytes[at + 44..at + 48].fill(0);
        }
        let error = check_slots(&bytes, AREA).expect_err("a slot past the end").to_string();
        assert_eq!(
            error,
            "key slot 3 ends at 0xffffffffffffffff, beyond the end of the LUKS header (0x1f9000)"
        );
    }

    proptest! {
        #[test]
        fn random_header_only_fails(at in 0..HEADER_BYTES, noise in proptest::collection::vec(any::<u8>(), 1..40), area: u64) {
            let mut bytes = header().encode();
            let end = HEADER_BYTES.min(at + noise.len());
            bytes[at..end].copy_from_slice(&noise[..end - at]);
            let _ = LuksHeader::parse(&bytes, area);
        }
    }
}
