//! "Did you mean …?": the known word nearest to one that is not known.

/// The word of `known` most like `word`, unless none is much like it.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // As clap treats misspelt options.
    const ALIKE: f64 = 0.7;
    let begins = |candidate: &str| candidate.strip_prefix(word).is_some_and(|rest| rest.starts_with('-'));
    let (mut best, mut abbreviated) = (None, None);
    for candidate in known {
        // The first that goes on where the word ends: `iops` is `iops-total`, before `iops-size`.
        if begins(candidate) {
            return Some(candidate);
        }
        if abbreviated.is_none() && is_abbreviation(word, candidate) {
            abbreviated = Some(candidate);
        }
        let likeness = strsim::jaro(word, candidate);
        if likeness > ALIKE && best.is_none_or(|(best, _)| likeness >= best) {
            best = Some((likeness, candidate));
        }
    }
    best.map(|(_, candidate)| candidate).or(abbreviated)
}

/// True if `word` is `candidate` without some of its letters, as `grp` is of `group`.
fn is_abbreviation(word: &str, candidate: &str) -> bool {
    const SHORTEST: usize = 3;
    let mut letters = candidate.chars();
    let begins_alike = word.chars().next() == candidate.chars().next();
    let is_contained = word.chars().all(|letter| letters.any(|other| other == letter));
    begins_alike && is_contained && word.len() >= SHORTEST && candidate.len() <= 2 * word.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_recognised_and_nonsense_is_not() {
        let known = ["cache", "iops-total", "iops-total-max", "image"];
        assert_eq!(nearest("iops_total", known), Some("iops-total"));
        assert_eq!(nearest("cahce", known), Some("cache"));
        assert_eq!(nearest("iops", ["iops-total", "iops-size", "iops"]), Some("iops-total"));
        assert_eq!(nearest("zzz", known), None);
        assert_eq!(nearest("grp", ["cache", "group", "export"]), Some("group"));
        assert_eq!(nearest("gp", ["group"]), None);
        assert_eq!(nearest("cache", []), None);
    }
}
