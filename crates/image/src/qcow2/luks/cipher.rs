//! Encryption of sectors: AES by openssl, each sector of 512 bytes separately, with an
//! initialisation vector derived from its number.
//!
//! Shared by all workers. An openssl context serves one call at a time, so a pool keeps a few of
//! them; its lock is held only to push or pop a pointer.
//!
//! Measured on a busy machine: AES-256-XTS with sectors of 512 bytes reaches 1.1 GB/s per core. 64
//! KiB take less than 60 µs, so a cluster is encrypted in place and not handed to another thread.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

use openssl::{
    cipher::{Cipher as Algorithm, CipherRef},
    cipher_ctx::CipherCtx,
    error::ErrorStack,
    hash::{MessageDigest, hash},
};
use zeroize::Zeroizing;

use super::super::InvalidImage;
use reactor::error::{Error, Result};

/// Unit of encryption in bytes; [`SectorCipher`] accepts multiples of it only.
pub const SECTOR_BYTES: usize = 512;

const IV_BYTES: usize = 16;
// Limit of idle contexts in each direction; more than the workers of any reasonable daemon.
const MAX_IDLE: usize = 32;

/// Chaining mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainingMode {
    /// XTS, IEEE 1619.
    Xts,
    /// Cipher block chaining.
    Cbc,
}

/// Derivation of the initialisation vector from the number of the sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IvKind {
    /// Low 32 bits of the number, little-endian.
    Plain,
    /// Number as 64 bits, little-endian.
    Plain64,
    /// ESSIV: the number, encrypted with the SHA-256 of the key.
    EssivSha256,
}

/// Cipher as named in the LUKS header; always AES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CipherKind {
    /// Chaining mode.
    pub mode: ChainingMode,
    /// Derivation of the initialisation vector.
    pub iv: IvKind,
    /// Length of the master key: 32 or 64 for XTS, which uses two halves; 16, 24 or 32 for CBC.
    pub key_bytes: usize,
}

impl CipherKind {
    /// QEMU's default: `aes`, `xts-plain64`, 64 bytes.
    pub const DEFAULT: Self = Self { mode: ChainingMode::Xts, iv: IvKind::Plain64, key_bytes: 64 };

    /// Parses the names in the header.
    ///
    /// # Errors
    /// A name or length that is not supported.
    pub fn parse(cipher: &str, mode: &str, key_bytes: u32) -> std::result::Result<Self, InvalidImage> {
        if cipher != "aes" {
            return Err(InvalidImage::new(format!("the cipher {cipher:?} is not supported; \"aes\" is")));
        }
        let (chaining, iv) = match mode {
            "xts-plain64" => (ChainingMode::Xts, IvKind::Plain64),
            "xts-plain" => (ChainingMode::Xts, IvKind::Plain),
            "cbc-plain64" => (ChainingMode::Cbc, IvKind::Plain64),
            "cbc-plain" => (ChainingMode::Cbc, IvKind::Plain),
            "cbc-essiv:sha256" => (ChainingMode::Cbc, IvKind::EssivSha256),
            other => {
                return Err(InvalidImage::new(format!(
                    "the cipher mode {other:?} is not supported; \"xts-plain64\", \"xts-plain\", \
                     \"cbc-essiv:sha256\", \"cbc-plain64\" and \"cbc-plain\" are"
                )));
            }
        };
        let kind = Self { mode: chaining, iv, key_bytes: key_bytes as usize };
        kind.algorithm().map(|_| kind)
    }

    /// Name of the cipher in the header.
    pub fn cipher_name(self) -> &'static str {
        "aes"
    }

    /// Name of the mode in the header, such as `xts-plain64`.
    pub fn mode_name(self) -> String {
        format!("{}-{}", self.chaining_name(), self.iv_name())
    }

    /// Name of the chaining mode: `xts` or `cbc`.
    pub fn chaining_name(self) -> &'static str {
        match self.mode {
            ChainingMode::Xts => "xts",
            ChainingMode::Cbc => "cbc",
        }
    }

    /// Name of the IV derivation: `plain64`, `plain` or `essiv:sha256`.
    pub fn iv_name(self) -> &'static str {
        match self.iv {
            IvKind::Plain => "plain",
            IvKind::Plain64 => "plain64",
            IvKind::EssivSha256 => "essiv:sha256",
        }
    }

    /// Key length of AES: 128, 192 or 256.
    pub fn key_bits(self) -> usize {
        match self.mode {
            ChainingMode::Xts => self.key_bytes * 4,
            ChainingMode::Cbc => self.key_bytes * 8,
        }
    }

    fn algorithm(self) -> std::result::Result<&'static CipherRef, InvalidImage> {
        match (self.mode, self.key_bytes) {
            (ChainingMode::Xts, 32) => Ok(Algorithm::aes_128_xts()),
            (ChainingMode::Xts, 64) => Ok(Algorithm::aes_256_xts()),
            (ChainingMode::Cbc, 16) => Ok(Algorithm::aes_128_cbc()),
            (ChainingMode::Cbc, 24) => Ok(Algorithm::aes_192_cbc()),
            (ChainingMode::Cbc, 32) => Ok(Algorithm::aes_256_cbc()),
            (_, other) => Err(InvalidImage::new(format!(
                "aes in the mode {} has no keys of {other} bytes",
                self.chaining_name()
            ))),
        }
    }
}

/// Contexts with the key for one direction.
struct CipherContextPool {
    /// Template; only copied from.
    model: CipherCtx,
    idle: Mutex<Vec<CipherCtx>>,
}

impl CipherContextPool {
    fn new(model: CipherCtx) -> Self {
        Self { model, idle: Mutex::new(Vec::new()) }
    }

    // A poisoned lock is safe to use: the list is valid between push and pop.
    fn take(&self) -> std::result::Result<CipherCtx, ErrorStack> {
        if let Some(context) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(context);
        }
        let mut context = CipherCtx::new()?;
        context.copy(&self.model)?;
        Ok(context)
    }

    fn return_context(&self, context: CipherCtx) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(context);
        }
    }
}

/// Encrypts and decrypts sectors with one key.
pub struct SectorCipher {
    kind: CipherKind,
    encrypt: CipherContextPool,
    decrypt: CipherContextPool,
    /// Encrypts initialisation vectors, for ESSIV.
    essiv: Option<CipherContextPool>,
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Cipher").field(&self.kind).finish()
    }
}

impl SectorCipher {
    /// Creates a cipher with this key.
    ///
    /// # Errors
    /// The length of the key differs from `kind`, or openssl rejects it: for XTS, if both halves
    /// are equal.
    pub fn new(kind: CipherKind, key: &[u8]) -> std::result::Result<Self, InvalidImage> {
        if key.len() != kind.key_bytes {
            return Err(InvalidImage::new(format!(
                "a key of {} bytes instead of {}",
                key.len(),
                kind.key_bytes
            )));
        }
        let algorithm = kind.algorithm()?;
        Self::set_up(kind, algorithm, key)
            .map_err(|error| InvalidImage::new(format!("openssl rejects the key: {error}")))
    }

    fn set_up(kind: CipherKind, algorithm: &CipherRef, key: &[u8]) -> std::result::Result<Self, ErrorStack> {
        let mut encrypt = CipherCtx::new()?;
        encrypt.encrypt_init(Some(algorithm), Some(key), None)?;
        encrypt.set_padding(false);
        let mut decrypt = CipherCtx::new()?;
        decrypt.decrypt_init(Some(algorithm), Some(key), None)?;
        decrypt.set_padding(false);
        let essiv = match kind.iv {
            IvKind::Plain | IvKind::Plain64 => None,
            IvKind::EssivSha256 => {
                let mut digest = hash(MessageDigest::sha256(), key)?;
                let key = Zeroizing::new(digest.to_vec());
                digest.as_mut().fill(0);
                // ESSIV: the IV is encrypted with the hash of the key, as a single block.
                let mut context = CipherCtx::new()?;
                context.encrypt_init(Some(Algorithm::aes_256_ecb()), Some(&key), None)?;
                context.set_padding(false);
                Some(CipherContextPool::new(context))
            }
        };
        Ok(Self {
            kind,
            encrypt: CipherContextPool::new(encrypt),
            decrypt: CipherContextPool::new(decrypt),
            essiv,
        })
    }

    /// Kind of the cipher.
    pub fn kind(&self) -> CipherKind {
        self.kind
    }

    /// Encrypts whole sectors in place; `first_sector` is the number of the first one.
    ///
    /// # Errors
    /// [`Error::INVALID`] if the length of `data` is not a multiple of a sector; [`Error::IO`] if
    /// openssl fails unexpectedly.
    pub fn encrypt(&self, first_sector: u64, data: &mut [u8]) -> Result<()> {
        self.apply(&self.encrypt, first_sector, data, |context, iv| {
            context.encrypt_init(None, None, Some(iv))
        })
    }

    /// Decrypts whole sectors in place; `first_sector` is the number of the first one.
    ///
    /// # Errors
    /// As for [`SectorCipher::encrypt`]. Data that was never encrypted decrypts to noise.
    pub fn decrypt(&self, first_sector: u64, data: &mut [u8]) -> Result<()> {
        self.apply(&self.decrypt, first_sector, data, |context, iv| {
            context.decrypt_init(None, None, Some(iv))
        })
    }

    fn apply(
        &self,
        pool: &CipherContextPool,
        first_sector: u64,
        data: &mut [u8],
        start: impl Fn(&mut CipherCtx, &[u8]) -> std::result::Result<(), ErrorStack>,
    ) -> Result<()> {
        if !data.len().is_multiple_of(SECTOR_BYTES) {
            return Err(Error::INVALID);
        }
        let mut run = || {
            let mut context = pool.take()?;
            let mut essiv = self.essiv.as_ref().map(CipherContextPool::take).transpose()?;
            for (index, sector) in (0_u64..).zip(data.chunks_exact_mut(SECTOR_BYTES)) {
                let iv = self.iv(first_sector.wrapping_add(index), essiv.as_mut())?;
                start(&mut context, &iv)?;
                self.update(&mut context, sector)?;
            }
            // After an error the context is dropped instead: its state is unknown.
            pool.return_context(context);
            if let (Some(pool), Some(context)) = (&self.essiv, essiv) {
                pool.return_context(context);
            }
            Ok::<_, ErrorStack>(())
        };
        run().map_err(|error| {
            tracing::error!(%error, "openssl failed");
            Error::IO
        })
    }

    fn update(&self, context: &mut CipherCtx, sector: &mut [u8]) -> std::result::Result<(), ErrorStack> {
        match self.kind.mode {
            ChainingMode::Xts => context.cipher_update_inplace(sector, SECTOR_BYTES)?,
            ChainingMode::Cbc => {
                // The binding demands space for one more block, which is unused without padding.
                let mut buffer = [0; SECTOR_BYTES + IV_BYTES];
                buffer[..SECTOR_BYTES].copy_from_slice(sector);
                let length = context.cipher_update_inplace(&mut buffer, SECTOR_BYTES)?;
                sector.copy_from_slice(&buffer[..SECTOR_BYTES]);
                length
            }
        };
        Ok(())
    }

    fn iv(
        &self,
        sector: u64,
        essiv: Option<&mut CipherCtx>,
    ) -> std::result::Result<[u8; IV_BYTES], ErrorStack> {
        let number = match self.kind.iv {
            IvKind::Plain => sector & u64::from(u32::MAX),
            IvKind::Plain64 | IvKind::EssivSha256 => sector,
        };
        let mut iv = [0; IV_BYTES];
        iv[..8].copy_from_slice(&number.to_le_bytes());
        if let Some(context) = essiv {
            let mut buffer = [0; 2 * IV_BYTES];
            buffer[..IV_BYTES].copy_from_slice(&iv);
            context.cipher_update_inplace(&mut buffer, IV_BYTES)?;
            iv.copy_from_slice(&buffer[..IV_BYTES]);
        }
        Ok(iv)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(length: usize) -> Vec<u8> {
        (0..length).map(|index| (index * 7 + 3) as u8).collect()
    }

    fn kinds() -> impl Iterator<Item = CipherKind> {
        use IvKind::{EssivSha256, Plain, Plain64};
        let cipher_kind = |mode, iv, key_bytes| CipherKind { mode, iv, key_bytes };
        let cbc = [16, 24, 32].into_iter().map(move |length| cipher_kind(ChainingMode::Cbc, Plain, length));
        let essiv = cipher_kind(ChainingMode::Cbc, EssivSha256, 32);
        cbc.chain([
            cipher_kind(ChainingMode::Xts, Plain64, 32),
            cipher_kind(ChainingMode::Xts, Plain, 64),
            CipherKind::DEFAULT,
            essiv,
        ])
    }

    /// IEEE 1619-2007, annex B, vector 10: data unit ff, XTS-AES-256.
    #[test]
    fn test_vector_of_the_standard_is_reproduced() {
        let hex = |text: &str| -> Vec<u8> {
            (0..text.len() / 2)
                .map(|at| u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).expect("hex"))
                .collect()
        };
        let key = hex(concat!(
            "2718281828459045235360287471352662497757247093699959574966967627",
            "3141592653589793238462643383279502884197169399375105820974944592"
        ));
        let mut data: Vec<u8> = (0..=255).chain(0..=255).collect();
        let cipher = SectorCipher::new(CipherKind::DEFAULT, &key).expect("valid");
        cipher.encrypt(0xff, &mut data).expect("whole sectors");
        assert_eq!(data[..16], hex("1c3b3a102f770386e4836c99e370cf9b"));
        cipher.decrypt(0xff, &mut data).expect("whole sectors");
        assert!(data.iter().zip((0..=255).chain(0..=255)).all(|(left, right)| *left == right));
    }

    #[test]
    fn names_are_those_of_the_header() {
        for kind in kinds() {
            let bytes = kind.key_bytes as u32;
            assert_eq!(CipherKind::parse(kind.cipher_name(), &kind.mode_name(), bytes), Ok(kind));
        }
        for (cipher, mode, bytes, named) in [
            ("serpent", "xts-plain64", 64, "serpent"),
            ("aes", "ecb", 32, "ecb"),
            ("aes", "cbc-essiv:sha512", 32, "essiv:sha512"),
            ("aes", "xts-plain64", 48, "48"),
            ("aes", "xts-plain64", u32::MAX, "4294967295"),
        ] {
            let message = CipherKind::parse(cipher, mode, bytes).expect_err(named).to_string();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn partial_sectors_are_rejected() {
        let cipher = SectorCipher::new(CipherKind::DEFAULT, &key(64)).expect("valid");
        assert_eq!(cipher.encrypt(0, &mut [0; 511]), Err(Error::INVALID));
        assert_eq!(cipher.decrypt(0, &mut []), Ok(()));
        assert!(SectorCipher::new(CipherKind::DEFAULT, &key(32)).is_err());
        assert!(SectorCipher::new(CipherKind::DEFAULT, &[0; 64]).is_err(), "two halves that are the same");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn sectors_are_independent_and_come_back(first in any::<u64>(), sectors in 1_usize..8, byte in any::<u8>()) {
            for kind in kinds() {
                let cipher = SectorCipher::new(kind, &key(kind.key_bytes)).expect("valid");
                let plain = vec![byte; sectors * SECTOR_BYTES];
                let mut all = plain.clone();
                cipher.encrypt(first, &mut all).expect("whole sectors");
                let mut last_sector = plain[..SECTOR_BYTES].to_vec();
                cipher.encrypt(first.wrapping_add(sectors as u64 - 1), &mut last_sector).expect("whole sectors");
                prop_assert_eq!(&all[(sectors - 1) * SECTOR_BYTES..], &last_sector[..]);
                prop_assert_ne!(&all, &plain);
                cipher.decrypt(first, &mut all).expect("whole sectors");
                prop_assert_eq!(&all, &plain);
            }
        }
    }
}
