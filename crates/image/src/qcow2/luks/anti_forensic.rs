//! The anti-forensic splitter: expands a key so that destroying a small part of the result
//! destroys the key.
//!
//! ```text
//!   s₁ ─► ⊕ ─► diffuse ─► ⊕ ─► diffuse … ─► ⊕ ─► key
//!         0              s₂                 sₙ
//! ```
//!
//! s₁ to sₙ₋₁ are random; sₙ is chosen so that the result is the key.
//!
//! Source: "LUKS On-Disk Format Specification" 1.2.3, section 2.4 (H1 is its diffuser).

use openssl::{
    error::ErrorStack,
    hash::{Hasher, MessageDigest},
};
use zeroize::Zeroizing;

/// Recovers the key from `material`, which has `stripes` times its length.
pub(super) fn merge(
    material: &[u8],
    stripes: usize,
    hash: MessageDigest,
) -> Result<Zeroizing<Vec<u8>>, ErrorStack> {
    let length = material.len() / stripes;
    let mut key = Zeroizing::new(vec![0; length]);
    let mut hasher = Hasher::new(hash)?;
    for (index, stripe) in material.chunks_exact(length).take(stripes).enumerate() {
        xor(&mut key, stripe);
        if index + 1 < stripes {
            diffuse(&mut key, &mut hasher, hash.size())?;
        }
    }
    Ok(key)
}

/// Splits `key` into `stripes` times its length.
pub(super) fn split(
    key: &[u8],
    stripes: usize,
    hash: MessageDigest,
) -> Result<Zeroizing<Vec<u8>>, ErrorStack> {
    let mut material = Zeroizing::new(vec![0; key.len() * stripes]);
    let (random, last) = material.split_at_mut(key.len() * (stripes - 1));
    openssl::rand::rand_bytes(random)?;
    let mut state = Zeroizing::new(vec![0; key.len()]);
    let mut hasher = Hasher::new(hash)?;
    for stripe in random.chunks_exact(key.len()) {
        xor(&mut state, stripe);
        diffuse(&mut state, &mut hasher, hash.size())?;
    }
    last.copy_from_slice(key);
    xor(last, &state);
    Ok(material)
}

fn xor(target: &mut [u8], mask: &[u8]) {
    for (byte, mask) in target.iter_mut().zip(mask) {
        *byte ^= mask;
    }
}

/// Replaces each piece of the digest's length by the digest of its index and content; the last
/// piece is truncated to its length.
fn diffuse(block: &mut [u8], hasher: &mut Hasher, digest_bytes: usize) -> Result<(), ErrorStack> {
    for (index, piece) in (0_u32..).zip(block.chunks_mut(digest_bytes)) {
        hasher.update(&index.to_be_bytes())?;
        hasher.update(piece)?;
        let mut digest = hasher.finish()?;
        piece.copy_from_slice(&digest[..piece.len()]);
        digest.as_mut().fill(0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_key_needs_every_stripe_to_merge() {
        for hash in [MessageDigest::sha1(), MessageDigest::sha256(), MessageDigest::sha512()] {
            for length in [16, 32, 64] {
                let key: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
                let mut material = split(&key, 20, hash).expect("openssl works");
                assert_eq!(*merge(&material, 20, hash).expect("openssl works"), key);
                let at = fastrand::usize(..material.len());
                material[at] ^= 1;
                assert_ne!(*merge(&material, 20, hash).expect("openssl works"), key);
            }
        }
    }
}
