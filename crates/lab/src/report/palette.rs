//! The colours of charts, for light and dark mode.
//!
//! plotters writes light colours into attributes. CSS rules override attributes, so the dark mode
//! is a list of rules `[stroke="#0072B2"] { stroke: … }` for the same drawing; hence each colour
//! has one meaning only. The lines' colours are those of Okabe and Ito (*Color Universal Design*,
//! 2008) for any colour vision, made stronger: five lines are solid and three dashed.

use plotters::style::RGBColor;

#[derive(Clone, Copy, Debug)]
pub(super) struct ColourPair {
    pub(super) light: RGBColor,
    dark: RGBColor,
}

const fn pair(light: u32, dark: u32) -> ColourPair {
    ColourPair { light: rgb(light), dark: rgb(dark) }
}

const fn rgb(code: u32) -> RGBColor {
    RGBColor((code >> 16) as u8, (code >> 8) as u8, code as u8)
}

/// Background; the page's style sheet has the same.
pub(super) const GROUND: ColourPair = pair(0xFF_FFFF, 0x17_191D);
pub(super) const INK: ColourPair = pair(0x33_3B46, 0xC9_D1DC);
pub(super) const GRID: ColourPair = pair(0xDF_E3E8, 0x33_3841);
/// Colours of lines; the first [`SOLID`] are solid.
pub(super) const LINES: [ColourPair; 8] = [
    pair(0x00_72B2, 0x2B_8FD6),
    pair(0xD5_5E00, 0xE8_702A),
    pair(0x00_9E73, 0x00_A87C),
    pair(0xCC_79A7, 0xDB_8DB8),
    pair(0x00_0000, 0xF2_F2F2),
    pair(0xB8_7A00, 0xF2_B134),
    pair(0x2C_9BDB, 0x8C_D0FA),
    pair(0x76_7676, 0x9A_9A9A),
];
pub(super) const SOLID: usize = 5;
/// Limits, dashed.
pub(super) const LIMIT: ColourPair = pair(0xA4_133C, 0xFF_8FA3);
/// Colours of cells, from the worst to the best, which contrasts most with the background.
pub(super) const CELLS: [ColourPair; 7] = [
    pair(0xF1_F6FB, 0x20_2A36),
    pair(0xD6_E6F4, 0x1D_3850),
    pair(0xB0_D2E8, 0x18_4A70),
    pair(0x7A_B8DA, 0x15_6396),
    pair(0x2A_78B6, 0x58_A6DC),
    pair(0x0F_5FA3, 0x8C_C4EA),
    pair(0x08_3E7A, 0xC6_E4F8),
];
/// Ratios above and below 1, from the nearest: the first half has text in [`ON_FAINT`].
pub(super) const BETTER: [ColourPair; 4] = [CELLS[1], CELLS[2], CELLS[5], CELLS[6]];
pub(super) const WORSE: [ColourPair; 4] = [
    pair(0xFB_E6D6, 0x3A_2618),
    pair(0xF5_C6A0, 0x5E_3815),
    pair(0xAD_4D0D, 0xE0_9050),
    pair(0x7A_3106, 0xF6_CBA4),
];
/// Cells before this index have text in [`ON_FAINT`], later ones in [`ON_STRONG`].
pub(super) const FAINT: usize = 4;
pub(super) const ON_FAINT: ColourPair = pair(0x10_1418, 0xF5_F7FA);
pub(super) const ON_STRONG: ColourPair = pair(0xFE_FEFE, 0x0B_0E12);
pub(super) const NO_CELL: ColourPair = pair(0xE9_EBED, 0x2A_2D33);

const ALL: [&[ColourPair]; 4] =
    [&[GROUND, INK, GRID, LIMIT, ON_FAINT, ON_STRONG, NO_CELL], &LINES, &CELLS, &WORSE];

pub(super) fn code(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

pub(super) fn dark_rules() -> String {
    let rule = |pair: &ColourPair| {
        let (light, dark) = (code(pair.light), code(pair.dark));
        format!("svg [fill=\"{light}\"]{{fill:{dark}}}svg [stroke=\"{light}\"]{{stroke:{dark}}}\n")
    };
    ALL.into_iter().flatten().map(rule).collect()
}

/// CSS rules for dashed lines; `scale` is a drawing's units per pixel.
pub(super) fn dash_rules(scale: i32) -> String {
    let dashes = [[7, 4], [2, 3], [12, 4]];
    // Selected by the stroke's colour: each dashed line has a colour that no solid line has.
    let rule = |(pair, [on, off]): (&ColourPair, [i32; 2])| {
        let (code, on, off) = (code(pair.light), on * scale, off * scale);
        format!("svg [stroke=\"{code}\"]{{stroke-dasharray:{on} {off}}}\n")
    };
    LINES[SOLID..].iter().zip(dashes).chain([(&LIMIT, [5, 5])]).map(rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Linear light intensities (IEC 61966-2-1).
    fn linear(RGBColor(red, green, blue): RGBColor) -> [f64; 3] {
        [red, green, blue].map(|part| {
            let part = f64::from(part) / 255.0;
            if part <= 0.040_45 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
        })
    }

    /// Web Content Accessibility Guidelines 2.1, "contrast ratio".
    fn contrast(one: RGBColor, other: RGBColor) -> f64 {
        let luminance = |colour| {
            let [red, green, blue] = linear(colour);
            0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05
        };
        let (one, other) = (luminance(one), luminance(other));
        (one / other).max(other / one)
    }

    const MODES: [fn(&ColourPair) -> RGBColor; 2] = [|pair| pair.light, |pair| pair.dark];

    #[test]
    fn lines_and_text_contrast_with_the_background() {
        for mode in MODES {
            let ground = mode(&GROUND);
            let mut lines = LINES.iter().chain([&LIMIT]);
            assert!(lines.all(|line| contrast(mode(line), ground) >= 3.0), "success criterion 1.4.11");
            assert!(contrast(mode(&INK), ground) >= 4.5, "success criterion 1.4.3");
        }
    }

    #[test]
    fn cell_text_contrasts_with_its_cell() {
        for mode in MODES {
            for (index, cell) in CELLS.iter().enumerate() {
                let letters = if index < FAINT { ON_FAINT } else { ON_STRONG };
                let contrast = contrast(mode(cell), mode(&letters));
                assert!(contrast >= 4.5, "cell {index}: {contrast}");
            }
            assert!(contrast(mode(&NO_CELL), mode(&ON_FAINT)) >= 4.5);
            for (index, (better, worse)) in BETTER.iter().zip(&WORSE).enumerate() {
                let letters = if index < BETTER.len() / 2 { ON_FAINT } else { ON_STRONG };
                for cell in [better, worse] {
                    let contrast = contrast(mode(cell), mode(&letters));
                    assert!(contrast >= 4.5, "step {index}: {contrast}");
                }
            }
        }
    }

    #[test]
    fn colours_have_one_meaning() {
        let mut codes: Vec<String> = ALL.into_iter().flatten().map(|pair| code(pair.light)).collect();
        let count = codes.len();
        codes.sort();
        codes.dedup();
        assert_eq!(codes.len(), count);
        assert_eq!(dark_rules().lines().count(), count);
    }

    /// Machado, Oliveira and Fernandes, *A Physiologically-based Model for Simulation of Color
    /// Vision Deficiency*, 2009, severity 1.
    const DEFICIENCIES: [[[f64; 3]; 3]; 4] = [
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    ];

    /// Coordinates in CIE 1976 L*a*b*.
    fn seen_with(colour: RGBColor, deficiency: &[[f64; 3]; 3]) -> [f64; 3] {
        let light = linear(colour);
        let dot = |row: &[f64; 3]| row.iter().zip(light).map(|(weight, part)| weight * part).sum::<f64>();
        let [red, green, blue] = deficiency.each_ref().map(|row| dot(row).clamp(0.0, 1.0));
        let root = |part: f64| if part > 0.008_856 { part.cbrt() } else { 7.787 * part + 16.0 / 116.0 };
        let x = root((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.950_47);
        let y = root(0.2126 * red + 0.7152 * green + 0.0722 * blue);
        let z = root((0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.088_83);
        [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
    }

    #[test]
    fn colours_differ_for_colour_blind_readers() {
        for mode in MODES {
            for deficiency in &DEFICIENCIES {
                for same_stroke in [&LINES[..SOLID], &LINES[SOLID..]] {
                    for (index, one) in same_stroke.iter().enumerate() {
                        for other in &same_stroke[index + 1..] {
                            let [one, other] = [one, other].map(|pair| seen_with(mode(pair), deficiency));
                            let distance =
                                one.iter().zip(other).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                            // A distance of about 2.3 is just noticeable; thin lines need several
                            // times that.
                            assert!(distance >= 12.0, "{one:?} and {other:?}: {distance}");
                        }
                    }
                }
            }
        }
    }
}
