//! Checks a packaged chart in memory, without unpacking it to disk.

use std::collections::HashSet;
use std::io::{self, Read};

use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use tar::{Archive, EntryType};
use thiserror::Error;

/// Maximum unpacked size of an archive in bytes (Helm's own limit).
const TOTAL_LIMIT: u64 = 100 << 20;
/// Maximum unpacked size of one file in bytes (Helm's own limit).
const FILE_LIMIT: u64 = 5 << 20;
const ENTRY_LIMIT: usize = 10_000;

/// Why an archive is rejected.
#[derive(Debug, Error)]
pub enum ArchiveError {
    #[error("it is not a gzip-compressed tar archive, or is damaged")]
    Damaged(#[source] io::Error),
    #[error("it has more than {ENTRY_LIMIT} entries")]
    Entries,
    #[error("it unpacks to more than {} MiB", TOTAL_LIMIT >> 20)]
    Total,
    #[error("{0} is larger than {limit} MiB", limit = FILE_LIMIT >> 20)]
    File(String),
    #[error("{0} is neither a file nor a folder; links and devices are refused")]
    Kind(String),
    #[error("the path {0} is refused: it leaves the chart's folder or is not plain")]
    Path(String),
    #[error("{0} is in it twice")]
    Twice(String),
    #[error("it has more than one folder at the top")]
    Folders,
    #[error("it has no Chart.yaml in its folder")]
    NoChartYaml,
    #[error("its Chart.yaml cannot be read")]
    ChartYaml(#[source] serde_saphyr::Error),
    #[error("its Chart.yaml contains {what}, which is not allowed")]
    Identity { what: String },
}

/// Content of `Chart.yaml`.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct ChartMetadata {
    pub name: String,
    pub version: String,
}

/// Reads the whole archive. Slow for large archives, so call it outside async threads.
pub(super) fn inspect(tgz: &[u8]) -> Result<ChartMetadata, ArchiveError> {
    // Read all members of the gzip stream, as Go and therefore Helm do.
    let mut tar = Archive::new(LimitedReader {
        inner: MultiGzDecoder::new(tgz),
        read: 0,
    });
    let result = read_entries(&mut tar);
    // Report the limit as the reason, even if reading failed first.
    if tar.into_inner().read > TOTAL_LIMIT {
        Err(ArchiveError::Total)
    } else {
        result
    }
}

fn read_entries(tar: &mut Archive<impl Read>) -> Result<ChartMetadata, ArchiveError> {
    let mut folder: Option<String> = None;
    let mut seen = HashSet::new();
    let mut chart_yaml = None;
    for (number, entry) in tar.entries().map_err(ArchiveError::Damaged)?.enumerate() {
        if number >= ENTRY_LIMIT {
            return Err(ArchiveError::Entries);
        }
        let mut entry = entry.map_err(ArchiveError::Damaged)?;
        let kind = entry.header().entry_type();
        // `git archive` stores the commit in such a header. It holds no file.
        if kind == EntryType::XGlobalHeader {
            continue;
        }
        let path = checked_path(&entry.path_bytes())?;
        if kind == EntryType::Directory {
            path_in_folder(&mut folder, &path)?;
            continue;
        }
        if kind != EntryType::Regular {
            return Err(ArchiveError::Kind(escaped(path.as_bytes())));
        }
        if entry.size() > FILE_LIMIT {
            return Err(ArchiveError::File(escaped(path.as_bytes())));
        }
        let inner = path_in_folder(&mut folder, &path)?;
        if inner == Some("Chart.yaml") {
            let mut text = Vec::new();
            entry
                .read_to_end(&mut text)
                .map_err(ArchiveError::Damaged)?;
            chart_yaml = Some(text);
        } else {
            io::copy(&mut entry, &mut io::sink()).map_err(ArchiveError::Damaged)?;
        }
        if !seen.insert(path.clone()) {
            return Err(ArchiveError::Twice(escaped(path.as_bytes())));
        }
    }
    parse_chart_yaml(&chart_yaml.ok_or(ArchiveError::NoChartYaml)?)
}

/// Returns the path if it is relative and all readers interpret it the same way.
fn checked_path(bytes: &[u8]) -> Result<String, ArchiveError> {
    let path_error = || ArchiveError::Path(escaped(bytes));
    let path = std::str::from_utf8(bytes).map_err(|_| path_error())?;
    let path = path.strip_suffix('/').unwrap_or(path);
    let is_invalid = |part: &str| part.is_empty() || part == "." || part == "..";
    // Helm treats a backslash as a separator and a colon as part of a drive name.
    let has_drive = path
        .split_once('/')
        .is_some_and(|(top, _)| top.ends_with(':'));
    if path.split('/').any(is_invalid)
        || has_drive
        || path.contains('\\')
        || path.contains(char::is_control)
    {
        return Err(path_error());
    }
    Ok(path.to_owned())
}

/// Returns the path below the single top-level folder, or `None` for the folder itself.
fn path_in_folder<'a>(
    folder: &mut Option<String>,
    path: &'a str,
) -> Result<Option<&'a str>, ArchiveError> {
    let (top, inner) = match path.split_once('/') {
        Some((top, inner)) => (top, Some(inner)),
        None => (path, None),
    };
    if folder.get_or_insert_with(|| top.to_owned()) == top {
        Ok(inner)
    } else {
        Err(ArchiveError::Folders)
    }
}

fn parse_chart_yaml(chart_yaml: &[u8]) -> Result<ChartMetadata, ArchiveError> {
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        with_snippet: false,
    };
    let metadata: ChartMetadata = serde_saphyr::from_slice_with_options(chart_yaml, options)
        .map_err(ArchiveError::ChartYaml)?;
    let name = metadata.name.as_str();
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\\']) {
        let what = format!("name {}", escaped(name.as_bytes()));
        return Err(ArchiveError::Identity { what });
    }
    if super::version::parse(&metadata.version).is_none() {
        let what = format!("version {}", escaped(metadata.version.as_bytes()));
        return Err(ArchiveError::Identity { what });
    }
    Ok(metadata)
}

/// Shortens a path and escapes its control characters for messages.
fn escaped(bytes: &[u8]) -> String {
    format!(
        "{:?}",
        String::from_utf8_lossy(bytes)
            .chars()
            .take(100)
            .collect::<String>()
    )
}

struct LimitedReader<R> {
    inner: R,
    read: u64,
}

impl<R: Read> Read for LimitedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.read > TOTAL_LIMIT {
            return Err(io::Error::other("too large"));
        }
        let count = self.inner.read(buffer)?;
        self.read += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;
    use tar::Header;

    use super::super::archive_properties;
    use super::*;
    use crate::fuzzing::shared;

    /// Writes the path unchanged, because `tar`'s own builder rejects the paths that this module must reject.
    pub(crate) fn entry(path: &str, kind: EntryType, content: &[u8]) -> Vec<u8> {
        let mut header = Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        if matches!(kind, EntryType::Symlink | EntryType::Link) {
            header.set_link_name("/etc/passwd").unwrap();
        }
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    pub(crate) fn file(path: &str, content: &str) -> Vec<u8> {
        entry(path, EntryType::Regular, content.as_bytes())
    }

    pub(crate) fn chart_yaml(name: &str, version: &str) -> Vec<u8> {
        file(
            &format!("{name}/Chart.yaml"),
            &format!("apiVersion: v2\nname: {name}\nversion: {version}\n"),
        )
    }

    pub(crate) fn packed(entries: &[Vec<u8>]) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        for entry in entries {
            gzip.write_all(entry).unwrap();
        }
        gzip.write_all(&[0; 1024]).unwrap();
        gzip.finish().unwrap()
    }

    #[test]
    fn chart_reports_name_and_version() {
        let tgz = packed(&[
            entry("small", EntryType::Directory, b""),
            chart_yaml("small", "1.2.3"),
            file("small/templates/a.yaml", "a: b"),
            file("small/charts/sub/Chart.yaml", "name: sub\nversion: 9.9.9"),
        ]);
        let metadata = inspect(&tgz).unwrap();
        assert_eq!(
            (metadata.name.as_str(), metadata.version.as_str()),
            ("small", "1.2.3")
        );
    }

    #[test]
    fn hostile_entries_are_refused() {
        let chart = || chart_yaml("small", "1.2.3");
        let empty = |kind| entry("small/empty", kind, b"");
        let cases: Vec<(&str, Vec<u8>, &str)> = vec![
            ("parent", file("small/../../etc/cron.d/x", "x"), "leaves"),
            ("absolute", file("/etc/passwd", "x"), "leaves"),
            ("dot", file("./small/x", "x"), "leaves"),
            ("backslash", file("small\\..\\x", "x"), "leaves"),
            ("drive", file("C:/x", "x"), "leaves"),
            ("control", file("small/a\nb", "x"), "leaves"),
            ("symlink", empty(EntryType::Symlink), "neither a file"),
            ("hard link", empty(EntryType::Link), "neither a file"),
            ("device", empty(EntryType::Block), "neither a file"),
            ("fifo", empty(EntryType::Fifo), "neither a file"),
            (
                "second folder",
                file("other/Chart.yaml", "name: other"),
                "more than one folder",
            ),
            ("twice", chart(), "twice"),
        ];
        for (case, hostile, reason) in cases {
            let error = inspect(&packed(&[chart(), hostile])).expect_err(case);
            assert!(error.to_string().contains(reason), "{case}: {error}");
        }
    }

    #[test]
    fn sizes_are_limited() {
        let limit = usize::try_from(FILE_LIMIT).unwrap();
        let chart = chart_yaml("small", "1.2.3");
        let large = entry("small/large", EntryType::Regular, &vec![0; limit + 1]);
        let error = inspect(&packed(&[chart.clone(), large])).unwrap_err();
        assert!(matches!(error, ArchiveError::File(_)), "{error}");

        let mut large_files = vec![chart.clone()];
        for number in 0..20 {
            large_files.push(entry(
                &format!("small/{number}"),
                EntryType::Regular,
                &vec![0; limit],
            ));
        }
        let error = inspect(&packed(&large_files)).unwrap_err();
        assert!(matches!(error, ArchiveError::Total), "{error}");

        let mut many_entries = vec![chart];
        many_entries.extend((0..ENTRY_LIMIT).map(|number| file(&format!("small/{number}"), "")));
        let error = inspect(&packed(&many_entries)).unwrap_err();
        assert!(matches!(error, ArchiveError::Entries), "{error}");
    }

    #[test]
    fn invalid_chart_archive_is_rejected() {
        let complete = packed(&[
            chart_yaml("small", "1.2.3"),
            file("small/b", &"b".repeat(9_000)),
        ]);
        let only = |path: &str, content: &str| packed(&[file(path, content)]);
        let latest = packed(&[chart_yaml("small", "latest")]);
        let path = only("small/Chart.yaml", "name: ../x\nversion: 1.0.0");
        let cases: Vec<(&str, Vec<u8>, &str)> = vec![
            ("rubbish", b"rubbish".to_vec(), "not a gzip"),
            ("empty", Vec::new(), "not a gzip"),
            ("cut", complete[..complete.len() / 2].to_vec(), "not a gzip"),
            ("missing", only("small/values.yaml", ""), "no Chart.yaml"),
            ("at the top", only("Chart.yaml", "name: a"), "no Chart.yaml"),
            ("odd", only("small/Chart.yaml", "[]"), "cannot be read"),
            ("no version", latest, "version \"latest\""),
            ("a path for a name", path, "name \"../x\""),
        ];
        for (case, tgz, reason) in cases {
            let error = inspect(&tgz).expect_err(case);
            assert!(error.to_string().contains(reason), "{case}: {error}");
        }
    }

    /// Seeds of the fuzzer, named after the expected result. `WRITE_CORPUS=1` writes them again.
    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let chart = || chart_yaml("small", "1.2.3");
        let with_entry = |entry: Vec<u8>| [chart(), entry, vec![0; 1024]].concat();
        let link = |kind| with_entry(entry("small/link", kind, b""));
        vec![
            (
                "good-chart",
                with_entry(file("small/values.yaml", "a: 1\n")),
            ),
            (
                "good-v",
                [chart_yaml("small", "v1.2.3-rc.1+b"), vec![0; 1024]].concat(),
            ),
            (
                "good-folders",
                with_entry(entry("small/templates/", EntryType::Directory, b"")),
            ),
            ("good-packed", packed(&[chart()])),
            (
                "refused-members",
                [packed(&[]), packed(&[chart()])].concat(),
            ),
            ("refused-parent", with_entry(file("small/../x", "x"))),
            ("refused-absolute", with_entry(file("/etc/passwd", "x"))),
            ("refused-backslash", with_entry(file("small\\..\\x", "x"))),
            ("refused-drive", with_entry(file("C:/x", "x"))),
            ("refused-symlink", link(EntryType::Symlink)),
            ("refused-hard-link", link(EntryType::Link)),
            ("refused-device", link(EntryType::Char)),
            ("refused-fifo", link(EntryType::Fifo)),
            ("refused-sparse", link(EntryType::GNUSparse)),
            ("refused-twice", with_entry(chart())),
            ("refused-folders", with_entry(file("other/x", "x"))),
            (
                "refused-long-name",
                with_entry(entry("small/x", EntryType::GNULongName, b"../../x\0")),
            ),
            (
                "refused-name",
                file("small/Chart.yaml", "name: ..\nversion: 1.0.0"),
            ),
            ("refused-version", chart_yaml("small", "latest")),
            (
                "refused-anchors",
                file("small/Chart.yaml", "name: &a [*a, *a]\nversion: 1.0.0"),
            ),
            ("refused-cut", chart().split_at(700).0.to_vec()),
            ("refused-empty", Vec::new()),
        ]
    }

    #[test]
    fn the_fuzzers_charts_are_good_or_refused() {
        shared::write("chart", &seeds());
        let corpus = shared::seeds("chart");
        assert!(
            corpus.len() >= seeds().len(),
            "write it with WRITE_CORPUS=1"
        );
        for (name, bytes) in corpus {
            let is_good = name.starts_with("good-");
            assert!(is_good || name.starts_with("refused-"), "{name}");
            let result = inspect(&archive_properties::packed(&bytes).unwrap());
            assert_eq!(result.is_ok(), is_good, "{name}: {result:?}");
        }
    }

    proptest! {
        #[test]
        fn damaged_archive_never_panics_or_changes_name(
            at in 0_usize..4096,
            byte in any::<u8>(),
            in_gzip in any::<bool>(),
        ) {
            let mut tar: Vec<u8> =
                [chart_yaml("small", "1.2.3"), file("small/values.yaml", "a: 1")].concat();
            let mut tgz = packed(&[tar.clone()]);
            if in_gzip {
                let at = at % tgz.len();
                tgz[at] = byte;
                // gzip has a checksum.
                prop_assert!(inspect(&tgz).map_or(true, |metadata| metadata.name == "small"));
            } else {
                let at = at % tar.len();
                tar[at] = byte;
                drop(inspect(&packed(&[tar])));
            }
        }
    }
}
