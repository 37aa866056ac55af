//! Reading: from pieces in the file, from its backing file, or as zeroes.

use std::sync::atomic::Ordering::Relaxed;

use super::{
    Invalid, Qcow2, compress,
    lookup::{Piece, What},
    luks::SECTOR_BYTES,
};
use reactor::{
    buffer::{Buffer, Segments, Target},
    error::{Error, Result},
};

/// What is encrypted at a time.
const SECTOR: u64 = SECTOR_BYTES as u64;

impl Qcow2 {
    /// Reads `length` bytes at `offset`, inside the disk.
    ///
    /// # Errors
    /// The file's; [`Error::IO`] where the image is corrupt.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Segments> {
        self.read_to(offset, Target::Anywhere(length)).await
    }

    /// The same, with the data where `target` wants it.
    pub(crate) async fn read_to(&self, offset: u64, target: Target) -> Result<Segments> {
        let _pass = self.gate.enter().await;
        // Inside, for a resize waits until nobody is.
        if !self.is_inside(offset, target.len() as u64) {
            return Err(Error::INVALID);
        }
        self.read_inside(offset, target).await
    }

    /// The same, for those who are inside already.
    pub(super) async fn read_inside(&self, offset: u64, target: Target) -> Result<Segments> {
        let length = target.len() as u64;
        if length == 0 {
            return Ok(Segments::default());
        }
        let first = self.lookup(offset, length).await?;
        if first.length == length {
            return self.read_piece(offset, first, target).await;
        }
        Box::pin(self.read_pieces(offset, target, first)).await
    }

    /// Several pieces at a time: the first here, the others in tasks of their own. Also where one
    /// fails all are waited for: until then the kernel may write to a guest's memory.
    async fn read_pieces(&self, offset: u64, mut target: Target, first: Piece) -> Result<Segments> {
        let mut others = Vec::new();
        let first_target = target.split_front(first.length as usize);
        let mut at = offset + first.length;
        let mut failed = Ok(());
        while !target.is_empty() {
            let piece = match self.lookup(at, target.len() as u64).await {
                Ok(piece) => piece,
                Err(error) => {
                    failed = Err(error);
                    break;
                }
            };
            let part = target.split_front(piece.length as usize);
            let image = self.clone();
            // They end with this future, which holds the pass for them.
            let reading = async move { image.read_piece(at, piece, part).await };
            at += piece.length;
            others.push(if reactor::is_in_background() {
                reactor::spawn_joinable(reactor::in_background(reading))
            } else {
                reactor::spawn_joinable(reading)
            });
        }
        let mut data = match failed {
            Ok(()) => self.read_piece(offset, first, first_target).await,
            Err(error) => Err(error),
        };
        for other in others {
            let read = other.await;
            data = data.and_then(|mut data| {
                data.append(read?);
                Ok(data)
            });
        }
        data
    }

    async fn read_piece(&self, offset: u64, piece: Piece, target: Target) -> Result<Segments> {
        match piece.what {
            What::Data { host, .. } => self.read_data(host, target).await,
            What::Zero { .. } => Ok(target.zeroes()),
            What::Unallocated => Box::pin(self.read_backing(offset, target)).await,
            What::Compressed { offset: host, length: most } => {
                Box::pin(self.read_compressed(offset, target, host, most)).await
            }
        }
    }

    /// Guest data from the file it lies in.
    async fn read_data(&self, host: u64, target: Target) -> Result<Segments> {
        let Some(cipher) = &self.cipher else { return self.read_stored(host, target).await };
        // Whole sectors: what is in between cannot be decrypted.
        let length = target.len();
        let first = host & !(SECTOR - 1);
        let end = (host + length as u64).next_multiple_of(SECTOR);
        let mut sectors = self.read_stored(first, Target::Anywhere((end - first) as usize)).await?.joined();
        cipher.decrypt(first / SECTOR, &mut sectors)?;
        sectors.advance((host - first) as usize);
        sectors.truncate(length);
        Ok(target.take(sectors))
    }

    async fn read_stored(&self, host: u64, mut target: Target) -> Result<Segments> {
        let storage = self.storage();
        // A file's last cluster may be incomplete: behind its end are zeroes.
        let there = storage.size_bytes().saturating_sub(host).min(target.len() as u64) as usize;
        if there == target.len() {
            return storage.read_into(host, target.memory()).await;
        }
        let front = target.split_front(there);
        let mut data = Segments::default();
        if there > 0 {
            data = storage.read_into(host, front.memory()).await?;
        }
        data.append(target.zeroes());
        Ok(data)
    }

    /// From the backing file, and zeroes behind its end.
    async fn read_backing(&self, offset: u64, mut target: Target) -> Result<Segments> {
        let there = self.backing_bytes(offset).min(target.len() as u64) as usize;
        if there > 0 && self.backing_changed.load(Relaxed) {
            return Err(Error::IO);
        }
        let mut data = Segments::default();
        if let Some(backing) = self.backing.as_ref().filter(|_| there > 0) {
            data = backing.read_to(offset, target.split_front(there)).await?;
        }
        if !target.is_empty() {
            data.append(target.zeroes());
        }
        Ok(data)
    }

    /// How many bytes from `offset` on the backing file has.
    pub(super) fn backing_bytes(&self, offset: u64) -> u64 {
        self.backing.as_ref().map_or(0, |backing| backing.size_bytes().saturating_sub(offset))
    }

    async fn read_compressed(&self, offset: u64, target: Target, host: u64, most: u64) -> Result<Segments> {
        let cluster_bytes = 1_usize << self.shape.cluster_bits;
        // The last data in the file may end before its last sector does.
        let there = self.file.size_bytes().saturating_sub(host).min(most);
        if there == 0 {
            let what = format!("compressed data at {host:#x} lies beyond the end of the file");
            return Err(self.file.found(&Invalid::new(what)));
        }
        let packed = self.file.storage().read(host, Buffer::new(there as usize)).await?.to_vec();
        let kind = self.compression;
        let unpacked = reactor::computing(move || {
            let mut cluster = vec![0; cluster_bytes];
            compress::decompress(kind, &packed, &mut cluster).map(|()| cluster)
        });
        let cluster = unpacked.await.map_err(|invalid| self.file.found(&invalid))?;
        let within = (offset as usize) & (cluster_bytes - 1);
        let end = within + target.len();
        Ok(target.copy_of(&cluster[within..end]))
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
