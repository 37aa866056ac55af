//! "Did you mean …?": the known word nearest to one that is not known.

/// The word of `known` most like `word`, unless none is much like it.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // As clap treats misspelt options.
    const ALIKE: f64 = 0.7;
    let likeness = |candidate: &'a str| (strsim::jaro(word, candidate), candidate);
    let best = known.into_iter().map(likeness).max_by(|left, right| left.0.total_cmp(&right.0))?;
    (best.0 > ALIKE).then_some(best.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_recognised_and_nonsense_is_not() {
        let known = ["cache", "iops-total", "iops-total-max", "image"];
        assert_eq!(nearest("iops_total", known), Some("iops-total"));
        assert_eq!(nearest("cahce", known), Some("cache"));
        assert_eq!(nearest("zzz", known), None);
        assert_eq!(nearest("cache", []), None);
    }
}
