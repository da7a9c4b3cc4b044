//! Kubeconfigs in files of the hub: a file, or all files of a directory, polled every two seconds. A
//! mounted ConfigMap or Secret changes by swapped symlinks, which watches of a path miss.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use krypton_runtime::periodic::file::{DEADLINE, read_or_wait};
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Policy, SanitizedKubeconfig};

use super::provider::by_origin;
use super::{Origin, Provider, ProviderHandle, Source, SourceKind, Unresolved};

const SCHEDULE: Schedule = Schedule {
    every: Duration::from_secs(2),
    jitter: 0.0,
    retry_max: Duration::from_secs(2),
};
/// Files per directory. At 256 KiB each, the hub reads at most 250 MiB, one file after the other, and keeps
/// far less.
const FILES_MAX: usize = 1_000;
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
        let name = Path::new(&origin.name);
        origin.kind == SourceKind::File
            && (name == self.path || name.parent() == Some(self.path.as_path()))
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
    source: Arc<Source>,
}

/// The result of the last poll.
#[derive(Clone, Debug, Default)]
struct PollResult {
    files: BTreeMap<PathBuf, KnownFile>,
    /// Whether the path was a file and not a directory.
    is_file: bool,
    /// Whether there are more files than `FILES_MAX`.
    exceeds_limit: bool,
}

/// Why the files cannot be listed.
#[derive(Debug, thiserror::Error)]
enum PollError {
    #[error("{path} is not there; mount it, or correct --kubeconfig-paths", path = path.display())]
    Absent { path: PathBuf },
    #[error("failed to read {path}; grant the hub's user the right to read it, or correct --kubeconfig-paths", path = path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is neither a file nor a directory; correct --kubeconfig-paths", path = path.display())]
    Neither { path: PathBuf },
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
                        tracing::warn!(path = %self.path.display(), "more than {FILES_MAX} kubeconfigs; ignoring the others");
                    }
                    current = next;
                    let sources = by_origin(current.files.values().map(|file| &file.source));
                    handle.publish(Some(sources), None);
                    Ok(NextRun::AsScheduled)
                }
                Err(error) => {
                    handle.publish(None, Some(chain(&error)));
                    Err(error)
                }
            };
            tokio::select! {
                () = periodic.pause_after(outcome) => {}
                // Read the file again even if its metadata is unchanged.
                origin = handle.next_reread() => {
                    if let Some(file) = current.files.get_mut(Path::new(&origin.name)) {
                        file.stamp = None;
                    }
                }
            }
        }
    }
}

/// Polls all files and reads the changed ones.
fn poll(path: &Path, policy: &Policy, previous: &PollResult) -> Result<PollResult, PollError> {
    let unreadable = |source| PollError::Unreadable {
        path: path.to_owned(),
        source,
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
            return Err(PollError::Absent {
                path: path.to_owned(),
            });
        }
        Err(error) => return Err(unreadable(error)),
    };
    let mut paths = Vec::new();
    if metadata.is_file() {
        next.is_file = true;
        paths.push(path.to_owned());
    } else if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(unreadable)?.take(ENTRIES_MAX) {
            let entry = entry.map_err(unreadable)?.path();
            if has_kubeconfig_name(&entry) {
                paths.push(entry);
            }
        }
    } else {
        return Err(PollError::Neither {
            path: path.to_owned(),
        });
    }
    // Sort the paths, so each poll selects the same files.
    paths.sort();
    for path in paths {
        let known = previous.files.get(&path);
        let file = match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => continue,
            Ok(metadata) => {
                let stamp = Some(FileStamp::new(&metadata));
                match known.filter(|known| known.stamp == stamp) {
                    Some(known) if known.settled => known.clone(),
                    known => KnownFile {
                        stamp,
                        settled: known.is_some(),
                        source: Arc::new(source(&path, read_file(&path, &metadata, policy))),
                    },
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => KnownFile {
                stamp: None,
                settled: false,
                source: Arc::new(source(&path, Err(unreadable_file(&path, &error)))),
            },
        };
        if next.files.len() == FILES_MAX {
            next.exceeds_limit = true;
            break;
        }
        next.files.insert(path, file);
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

fn source(path: &Path, access: Result<SanitizedKubeconfig, String>) -> Source {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let member = name.split('.').next().unwrap_or_default();
    Source {
        origin: Origin {
            kind: SourceKind::File,
            namespace: None,
            name: path.to_string_lossy().into_owned(),
        },
        uid: String::new(),
        member: member.to_owned(),
        since: None,
        access: access.map(Arc::new).map_err(|message| Unresolved {
            reason: reason::KUBECONFIG_INVALID,
            message,
        }),
        suspended: None,
        stale: None,
    }
}

fn read_file(
    path: &Path,
    metadata: &Metadata,
    policy: &Policy,
) -> Result<SanitizedKubeconfig, String> {
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
    let bytes = read().map_err(|error| unreadable_file(path, &error))?;
    kubeconfig::parse(&bytes, policy)
        .map_err(|error| format!("{}: {}", path.display(), chain(&error)))
}

fn unreadable_file(path: &Path, error: &io::Error) -> String {
    format!("reading {} failed: {error}", path.display())
}

#[cfg(test)]
mod tests;
