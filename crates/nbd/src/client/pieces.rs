//! Received parts of a read's data: a server may send it in pieces, in any order, each once.

use std::ops::Range;

/// Maximum number of disjoint pieces. Adjacent pieces are merged, so a server that sends them in
/// order has one.
const MAX_PIECES: usize = 1024;

/// Sorted, disjoint and not adjacent.
#[derive(Debug, Default)]
pub(super) struct ReceivedPieces(Vec<Range<usize>>);

impl ReceivedPieces {
    /// Adds a non-empty piece; fails if it overlaps or there are too many.
    pub(super) fn add(&mut self, piece: Range<usize>) -> Result<(), &'static str> {
        // Pieces do not overlap, so only the two neighbours matter.
        let next = self.0.partition_point(|other| other.start < piece.start);
        let is_full = self.0.len() == MAX_PIECES;
        let (before, after) = self.0.split_at_mut(next);
        let (before, after) = (before.last_mut(), after.first_mut());
        let overlaps = before.as_ref().is_some_and(|before| before.end > piece.start)
            || after.as_ref().is_some_and(|after| after.start < piece.end);
        if overlaps {
            return Err("a part of a read's data twice");
        }
        match (before, after) {
            (Some(before), Some(after)) if before.end == piece.start && after.start == piece.end => {
                before.end = after.end;
                self.0.remove(next);
            }
            (Some(before), _) if before.end == piece.start => before.end = piece.end,
            (_, Some(after)) if after.start == piece.end => after.start = piece.start,
            _ if is_full => return Err("a read's data in too many pieces"),
            _ => self.0.insert(next, piece),
        }
        Ok(())
    }

    /// True if the pieces cover all of `length` bytes.
    pub(super) fn covers(&self, length: usize) -> bool {
        length == 0 || matches!(&self.0[..], [one] if *one == (0..length))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_byte_is_accepted_once(pieces in prop::collection::vec((0..60_usize, 1..30_usize), 0..40)) {
            let (mut found, mut model) = (ReceivedPieces::default(), [false; 90]);
            for (start, length) in pieces {
                let part = &mut model[start..start + length];
                let is_new = part.iter().all(|is_received| !is_received);
                prop_assert_eq!(found.add(start..start + length).is_ok(), is_new);
                if is_new {
                    part.fill(true);
                }
                let all = model.iter().take_while(|is_received| **is_received).count();
                let is_contiguous = model[all..].iter().all(|is_received| !is_received);
                prop_assert!((0..90).all(|length| found.covers(length) == (length == 0 || (is_contiguous && length == all))));
            }
        }
    }

    #[test]
    fn number_of_pieces_is_bounded() {
        let mut pieces = ReceivedPieces::default();
        for number in 0..MAX_PIECES {
            assert_eq!(pieces.add(2 * number..2 * number + 1), Ok(()));
        }
        assert!(pieces.add(2 * MAX_PIECES..2 * MAX_PIECES + 1).is_err());
        assert_eq!(pieces.add(1..2), Ok(()));
    }
}
