//! Kubeconfigs in files of the hub: a file, or all files of a directory, polled every two seconds. A
//! mounted ConfigMap or Secret changes by swapped symlinks, which watches of a path miss.
//!
//! Each context is a source. The current one has the path of its file as origin, and each other one the path,
//! `+` and its name.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use krypton_runtime::periodic::file::{DEADLINE, read_or_wait};
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::fingerprint::sha256_hex;
use krypton_types::kubeconfig::{self, KubeconfigError, Policy, SanitizedKubeconfig};

use super::provider::by_origin;
use super::{Origin, Provider, ProviderHandle, Source, SourceKind, Unresolved};

const SCHEDULE: Schedule = Schedule {
    every: Duration::from_secs(2),
    jitter: 0.0,
    retry_max: Duration::from_secs(2),
};
/// Contexts per path. At 256 KiB each, the hub reads at most 250 MiB, one file after the other, and keeps far
/// less.
const CONTEXTS_MAX: usize = 1_000;
/// Limit of `spec.sourceRef.name`, which contains the origin.
const ORIGIN_MAX: usize = 253;
const DIGEST_CHARACTERS: usize = 12;
/// Directory entries that are examined to find the files.
const ENTRIES_MAX: usize = 20_000;
const EXTENSIONS: [&str; 4] = ["kubeconfig", "yaml", "yml", "conf"];

/// The kubeconfigs of one path of `--kubeconfig-paths`.
#[derive(Debug)]
pub struct KubeconfigFiles {
    /// Absolute.
    path: PathBuf,
    policy: Policy,
}

impl KubeconfigFiles {
    pub fn new(path: &Path, policy: Policy) -> Self {
        Self {
            // Fails only for an empty path or if the working directory is gone.
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            policy,
        }
    }
}

impl Provider for KubeconfigFiles {
    fn describe(&self) -> String {
        format!("kubeconfigs in {}", self.path.display())
    }

    fn covers(&self, origin: &Origin) -> bool {
        let is_in_folder = |path: &Path| path.parent() == Some(self.path.as_path());
        let path = Path::new(&origin.name);
        let is_file = path == self.path || is_in_folder(path);
        let is_context = || {
            let mut paths = files_of_context(&origin.name).map(Path::new);
            paths.any(|path| path == self.path || (is_in_folder(path) && has_kubeconfig_name(path)))
        };
        origin.kind == SourceKind::File && (is_file || is_context())
    }

    fn follow(self: Arc<Self>, handle: ProviderHandle) -> BoxFuture<'static, ()> {
        async move { self.run(&handle).await }.boxed()
    }
}

/// File metadata that changes with the content, to detect changes without a read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileStamp {
    device_and_inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    pub(crate) fn new(metadata: &Metadata) -> Self {
        Self {
            device_and_inode: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// A file as it was last read.
#[derive(Clone, Debug)]
struct KnownFile {
    /// `None` forces a read.
    stamp: Option<FileStamp>,
    /// Whether the file was read again under the same stamp. File system timestamps are coarse: a write
    /// right after the first read may have the same time.
    settled: bool,
    /// The current context, followed by the others.
    sources: Vec<Arc<Source>>,
}

/// The result of the last poll.
#[derive(Clone, Debug, Default)]
struct PollResult {
    files: BTreeMap<PathBuf, KnownFile>,
    /// Whether the path was a file and not a directory.
    is_file: bool,
    /// Whether the files have more contexts than `CONTEXTS_MAX`.
    exceeds_limit: bool,
}

impl PollResult {
    fn sources(&self) -> impl Iterator<Item = &Arc<Source>> {
        let sources = self.files.values().flat_map(|file| &file.sources);
        sources.take(CONTEXTS_MAX)
    }
}

impl KubeconfigFiles {
    async fn run(&self, handle: &ProviderHandle) {
        let mut periodic = Periodic::new("looking for kubeconfigs", SCHEDULE);
        let mut current = PollResult::default();
        loop {
            let (path, policy, previous) = (self.path.clone(), self.policy, current.clone());
            let report_hang = |hangs: bool| {
                let path = self.path.display();
                let problem = format!(
                    "{path}: the file system does not respond; check whether its mount hangs"
                );
                handle.publish(None, hangs.then_some(problem));
            };
            let read = move || poll(&path, &policy, &previous);
            let Some(result) = read_or_wait(DEADLINE, read, report_hang).await else {
                return; // the runtime is shutting down
            };
            let outcome = match result {
                Ok(next) => {
                    if next.exceeds_limit && !current.exceeds_limit {
                        tracing::warn!(path = %self.path.display(), limit = CONTEXTS_MAX, "too many contexts; ignoring the others");
                    }
                    current = next;
                    handle.publish(Some(by_origin(current.sources())), None);
                    Ok(NextRun::AsScheduled)
                }
                Err(error) => {
                    handle.publish(None, Some(chain(&*error)));
                    Err(error)
                }
            };
            tokio::select! {
                () = periodic.pause_after(outcome) => {}
                // Read the file again even if its metadata is unchanged.
                origin = handle.next_reread() => {
                    let mut files = current.files.values_mut();
                    let has_context = |file: &&mut KnownFile| {
                        file.sources.iter().any(|source| source.origin == origin)
                    };
                    if let Some(file) = files.find(has_context) {
                        file.stamp = None;
                    }
                }
            }
        }
    }
}

/// Polls all files and reads the changed ones.
fn poll(path: &Path, policy: &Policy, previous: &PollResult) -> anyhow::Result<PollResult> {
    let unreadable = || {
        format!(
            "failed to read {}; grant the hub's user the right to read it, or correct --kubeconfig-paths",
            path.display()
        )
    };
    let mut next = PollResult::default();
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // A file that existed before is gone. A path that never existed may be a directory that is not
        // mounted yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound && previous.is_file => {
            next.is_file = true;
            return Ok(next);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!(
                "{} is missing; mount it, or correct --kubeconfig-paths",
                path.display()
            );
        }
        Err(error) => return Err(anyhow::Error::new(error).context(unreadable())),
    };
    let mut paths = Vec::new();
    if metadata.is_file() {
        next.is_file = true;
        paths.push(path.to_owned());
    } else if metadata.is_dir() {
        for entry in fs::read_dir(path)
            .with_context(unreadable)?
            .take(ENTRIES_MAX)
        {
            let entry = entry.with_context(unreadable)?.path();
            if has_kubeconfig_name(&entry) {
                paths.push(entry);
            }
        }
    } else {
        bail!(
            "{} is neither a file nor a directory; correct --kubeconfig-paths",
            path.display()
        );
    }
    // Sort the paths, so each poll selects the same files.
    paths.sort();
    let mut contexts = 0;
    for path in paths {
        let known = previous.files.get(&path);
        let known_sources = known.map_or(&[][..], |known| &known.sources);
        let file = match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => continue,
            Ok(metadata) => {
                let stamp = Some(FileStamp::new(&metadata));
                match known.filter(|known| known.stamp == stamp) {
                    Some(known) if known.settled => known.clone(),
                    known => KnownFile {
                        stamp,
                        settled: known.is_some(),
                        sources: sources(&path, read_file(&path, &metadata), policy, known_sources),
                    },
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => KnownFile {
                stamp: None,
                settled: false,
                sources: sources(
                    &path,
                    Err(unreadable_file(&path, &error)),
                    policy,
                    known_sources,
                ),
            },
        };
        contexts += file.sources.len();
        next.files.insert(path, file);
        if contexts > CONTEXTS_MAX {
            next.exceeds_limit = true;
            break;
        }
    }
    Ok(next)
}

fn has_kubeconfig_name(path: &Path) -> bool {
    let hidden = path
        .file_name()
        .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    let extension = path.extension().and_then(OsStr::to_str);
    !hidden && extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
}

/// Returns the paths that the origin of a context can start with. A path and a context can contain `+` too.
pub(super) fn files_of_context(origin: &str) -> impl Iterator<Item = &str> {
    let separators = origin.match_indices('+');
    separators.filter_map(|(position, _)| origin.get(..position))
}

/// Reads the contexts of a file. If the file cannot be read as a whole, its known contexts stay, with that
/// error.
fn sources(
    path: &Path,
    content: Result<Vec<u8>, String>,
    policy: &Policy,
    known: &[Arc<Source>],
) -> Vec<Arc<Source>> {
    let file = path.to_string_lossy();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let member = name.split('.').next().unwrap_or_default();
    let contexts = content.and_then(|bytes| {
        let others = kubeconfig::parse_other_contexts(&bytes, policy, CONTEXTS_MAX);
        let others = others.map_err(|error| describe(&file, &error))?;
        let current = kubeconfig::parse(&bytes, policy);
        Ok((current.map_err(|error| describe(&file, &error)), others))
    });
    let (current, others): (_, Vec<Source>) = match contexts {
        Ok((current, others)) => {
            let others = others.into_iter().map(|(context, access)| {
                let (origin, member) = context_names(&file, member, &context);
                let access = access.map_err(|error| describe(&origin, &error));
                source(origin, member, access)
            });
            (current, others.collect())
        }
        Err(problem) => {
            let others = known.iter().skip(1).map(|known| Source {
                access: Err(invalid(problem.clone())),
                ..Source::clone(known)
            });
            (Err(problem.clone()), others.collect())
        }
    };
    let current = source(file.to_string(), member.to_owned(), current);
    let all = std::iter::once(current).chain(others);
    all.map(Arc::new).collect()
}

/// Returns the origin and the member name of a context that is not the current one. A context whose name does
/// not fit into the origin is represented by its digest.
fn context_names(file: &str, member: &str, context: &str) -> (String, String) {
    let fits = file.len() + 1 + context.len() <= ORIGIN_MAX;
    let context = match fits && !context.chars().any(char::is_control) {
        true => context.to_owned(),
        false => {
            let digest = sha256_hex(context.as_bytes());
            digest.chars().take(DIGEST_CHARACTERS).collect()
        }
    };
    // The names that cloud providers generate contain characters that a member name can't have.
    let legal = |c: char| match c.is_ascii_alphanumeric() {
        true => c.to_ascii_lowercase(),
        false => '-',
    };
    let suffix: String = context.chars().map(legal).collect();
    let suffix = suffix.trim_matches('-');
    (format!("{file}+{context}"), format!("{member}-{suffix}"))
}

fn source(origin: String, member: String, access: Result<SanitizedKubeconfig, String>) -> Source {
    Source {
        access: access.map(Arc::new).map_err(invalid),
        ..Source::unread(Origin::file(origin), member, String::new())
    }
}

fn invalid(message: String) -> Unresolved {
    Unresolved::new(reason::KUBECONFIG_INVALID, message)
}

fn describe(origin: &str, error: &KubeconfigError) -> String {
    format!("{origin}: {}", chain(error))
}

fn read_file(path: &Path, metadata: &Metadata) -> Result<Vec<u8>, String> {
    // Opening a pipe would wait for a writer.
    if !metadata.is_file() {
        return Err(format!("{} is not a file", path.display()));
    }
    let read = || {
        let mut bytes = Vec::new();
        // Read one byte more than allowed to detect a file that is too large.
        let limit = kubeconfig::SIZE_MAX as u64 + 1;
        fs::File::open(path)?.take(limit).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read().map_err(|error| unreadable_file(path, &error))
}

fn unreadable_file(path: &Path, error: &io::Error) -> String {
    format!("reading {} failed: {error}", path.display())
}

#[cfg(test)]
mod tests;
