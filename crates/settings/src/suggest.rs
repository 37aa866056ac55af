//! "Did you mean …?": suggestions for unknown words.

/// Word of `known` that is most similar to `word`; `None` if none is similar.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // clap's threshold for misspelt options.
    const MIN_SIMILARITY: f64 = 0.7;
    let begins = |candidate: &str| candidate.strip_prefix(word).is_some_and(|rest| rest.starts_with('-'));
    let (mut best, mut abbreviated) = (None, None);
    for candidate in known {
        // Completions come first: `iops` suggests `iops-total`, not `iops-size`.
        if begins(candidate) {
            return Some(candidate);
        }
        if abbreviated.is_none() && is_abbreviation(word, candidate) {
            abbreviated = Some(candidate);
        }
        // Jaro similarity suits short words with swapped letters.
        let similarity = strsim::jaro(word, candidate);
        if similarity > MIN_SIMILARITY && best.is_none_or(|(best, _)| similarity >= best) {
            best = Some((similarity, candidate));
        }
    }
    best.map(|(_, candidate)| candidate).or(abbreviated)
}

/// True if `word` is `candidate` without some letters, as `grp` for `group`.
fn is_abbreviation(word: &str, candidate: &str) -> bool {
    // Two letters are contained in almost any word.
    const MIN_LENGTH: usize = 3;
    let mut characters = candidate.chars();
    let begins_alike = word.chars().next() == candidate.chars().next();
    let is_contained = word.chars().all(|character| characters.any(|other| other == character));
    begins_alike && is_contained && word.len() >= MIN_LENGTH && candidate.len() <= 2 * word.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_words_are_suggested_and_others_are_not() {
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
