//! Reading: from pieces in the file, from its backing file, or as zeroes.

use std::sync::atomic::Ordering::Relaxed;

use super::{
    Invalid, Qcow2, compress,
    lookup::{Piece, What},
    luks::SECTOR_BYTES,
};
use crate::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
    reactor,
};

/// What is encrypted at a time.
const SECTOR: u64 = SECTOR_BYTES as u64;

impl Qcow2 {
    /// Reads `length` bytes at `offset`, inside the disk.
    ///
    /// # Errors
    /// The file's; [`Error::IO`] where the image is corrupt.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Segments> {
        let _pass = self.gate.enter().await;
        // Inside, for a resize waits until nobody is.
        if !self.is_inside(offset, length as u64) {
            return Err(Error::INVALID);
        }
        self.read_inside(offset, length).await
    }

    /// The same, for those who are inside already.
    pub(super) async fn read_inside(&self, offset: u64, length: usize) -> Result<Segments> {
        if length == 0 {
            return Ok(Segments::default());
        }
        let first = self.lookup(offset, length as u64).await?;
        if first.length == length as u64 {
            return self.read_piece(offset, first).await;
        }
        Box::pin(self.read_pieces(offset, length as u64, first)).await
    }

    /// Several pieces at a time: the first here, the others in tasks of their own.
    async fn read_pieces(&self, offset: u64, length: u64, first: Piece) -> Result<Segments> {
        let mut others = Vec::new();
        let mut done = first.length;
        while done < length {
            let at = offset + done;
            let piece = self.lookup(at, length - done).await?;
            done += piece.length;
            let image = self.clone();
            // They end with this future, which holds the pass for them.
            let reading = async move { image.read_piece(at, piece).await };
            others.push(if reactor::is_in_background() {
                reactor::spawn_joinable(reactor::in_background(reading))
            } else {
                reactor::spawn_joinable(reading)
            });
        }
        let mut data = self.read_piece(offset, first).await?;
        for other in others {
            data.append(other.await?);
        }
        Ok(data)
    }

    async fn read_piece(&self, offset: u64, piece: Piece) -> Result<Segments> {
        let length = piece.length as usize;
        match piece.what {
            What::Data { host, .. } => Ok(self.read_data(host, length).await?.into()),
            What::Zero { .. } => Ok(Buffer::zeroed(length).into()),
            What::Unallocated => Box::pin(self.read_backing(offset, length)).await,
            What::Compressed { offset: host, length: most } => {
                Ok(Box::pin(self.read_compressed(offset, length, host, most)).await?.into())
            }
        }
    }

    /// Guest data from the file it lies in.
    async fn read_data(&self, host: u64, length: usize) -> Result<Buffer> {
        let Some(cipher) = &self.cipher else { return self.read_stored(host, length).await };
        // Whole sectors: what is in between cannot be decrypted.
        let first = host & !(SECTOR - 1);
        let end = (host + length as u64).next_multiple_of(SECTOR);
        let mut sectors = self.read_stored(first, (end - first) as usize).await?;
        cipher.decrypt(first / SECTOR, &mut sectors)?;
        sectors.advance((host - first) as usize);
        sectors.truncate(length);
        Ok(sectors)
    }

    async fn read_stored(&self, host: u64, length: usize) -> Result<Buffer> {
        let storage = self.storage();
        let mut buffer = Buffer::new(length);
        // A file's last cluster may be incomplete: behind its end are zeroes.
        let there = storage.size_bytes().saturating_sub(host).min(length as u64) as usize;
        if there == length {
            return storage.read(host, buffer).await;
        }
        buffer.fill(0);
        if there > 0 {
            let front = storage.read(host, Buffer::new(there)).await?;
            buffer[..there].copy_from_slice(&front);
        }
        Ok(buffer)
    }

    /// From the backing file, and zeroes behind its end.
    async fn read_backing(&self, offset: u64, length: usize) -> Result<Segments> {
        let there = self.backing_bytes(offset).min(length as u64) as usize;
        if there > 0 && self.backing_changed.load(Relaxed) {
            return Err(Error::IO);
        }
        let mut data = Segments::default();
        if let Some(backing) = self.backing.as_ref().filter(|_| there > 0) {
            data = backing.read(offset, there).await?;
        }
        if there < length {
            data.push(Buffer::zeroed(length - there));
        }
        Ok(data)
    }

    /// How many bytes from `offset` on the backing file has.
    pub(super) fn backing_bytes(&self, offset: u64) -> u64 {
        self.backing.as_ref().map_or(0, |backing| backing.size_bytes().saturating_sub(offset))
    }

    async fn read_compressed(&self, offset: u64, length: usize, host: u64, most: u64) -> Result<Buffer> {
        let cluster_bytes = 1_usize << self.shape.cluster_bits;
        // The last data in the file may end before its last sector does.
        let there = self.file.size_bytes().saturating_sub(host).min(most);
        if there == 0 {
            let what = format!("compressed data at {host:#x} lies beyond the end of the file");
            return Err(self.file.found(&Invalid::new(what)));
        }
        let packed = self.file.storage().read(host, Buffer::new(there as usize)).await?.to_vec();
        let kind = self.compression;
        let unpacked = reactor::blocking(move || {
            let mut cluster = vec![0; cluster_bytes];
            compress::decompress(kind, &packed, &mut cluster).map(|()| cluster)
        });
        let cluster = unpacked.await.map_err(|invalid| self.file.found(&invalid))?;
        let within = (offset as usize) & (cluster_bytes - 1);
        Ok(Buffer::copy_of(&cluster[within..within + length]))
    }

    /// Whether all of the range reads as zeroes, as far as the image itself can tell.
    pub(super) async fn is_zero(&self, mut offset: u64, mut length: u64) -> Result<bool> {
        while length > 0 {
            let piece = self.lookup(offset, length).await?;
            let is_zero = match piece.what {
                What::Zero { .. } => true,
                What::Unallocated => self.backing_bytes(offset) == 0,
                What::Data { .. } | What::Compressed { .. } => false,
            };
            if !is_zero {
                return Ok(false);
            }
            offset += piece.length;
            length -= piece.length;
        }
        Ok(true)
    }
}
