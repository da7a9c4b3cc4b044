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
use krypton_runtime::periodic::{Next, Periodic, Schedule};
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Policy, Sanitized};

use super::provider::by_origin;
use super::{Finds, Kind, Origin, Provider, Source, Unresolved};

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
pub struct Files {
    /// Absolute.
    path: PathBuf,
    policy: Policy,
}

impl Files {
    pub fn new(path: &Path, policy: Policy) -> Self {
        Self {
            // Fails only for an empty path or if the working directory is gone.
            path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
            policy,
        }
    }
}

impl Provider for Files {
    fn describe(&self) -> String {
        format!("kubeconfigs in {}", self.path.display())
    }

    fn covers(&self, origin: &Origin) -> bool {
        let name = Path::new(&origin.name);
        origin.kind == Kind::File
            && (name == self.path || name.parent() == Some(self.path.as_path()))
    }

    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()> {
        async move { self.run(&finds).await }.boxed()
    }
}

/// File metadata that changes with the content, to detect changes without a read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    place: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        Self {
            place: (metadata.dev(), metadata.ino()),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// The last read of a file.
#[derive(Clone, Debug)]
struct File {
    /// `None` forces a read.
    stamp: Option<Stamp>,
    /// Whether the file was read again under the same stamp. File system timestamps are coarse: a write
    /// right after the first read may have the same time.
    settled: bool,
    source: Arc<Source>,
}

/// The result of the last poll.
#[derive(Clone, Debug, Default)]
struct Seen {
    files: BTreeMap<PathBuf, File>,
    /// Whether the path was a file and not a directory.
    file: bool,
    left_out: bool,
}

/// Why the files cannot be listed.
#[derive(Debug, thiserror::Error)]
enum LookError {
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

impl Files {
    async fn run(&self, finds: &Finds) {
        let mut pace = Periodic::new("looking for kubeconfigs", SCHEDULE);
        let mut seen = Seen::default();
        loop {
            let (path, policy, before) = (self.path.clone(), self.policy, seen.clone());
            let hangs = |hangs: bool| {
                let path = self.path.display();
                let why = format!(
                    "{path}: the file system does not respond; check whether its mount hangs"
                );
                finds.publish(None, hangs.then_some(why));
            };
            let look = move || look(&path, &policy, &before);
            let Some(looked) = read_or_wait(DEADLINE, look, hangs).await else {
                return; // the runtime is shutting down
            };
            let done = match looked {
                Ok(next) => {
                    if next.left_out && !seen.left_out {
                        tracing::warn!(path = %self.path.display(), "more than {FILES_MAX} kubeconfigs; ignoring the others");
                    }
                    seen = next;
                    let sources = by_origin(seen.files.values().map(|file| &file.source));
                    finds.publish(Some(sources), None);
                    Ok(Next::AsScheduled)
                }
                Err(error) => {
                    finds.publish(None, Some(chain(&error)));
                    Err(error)
                }
            };
            tokio::select! {
                () = pace.rest(done) => {}
                // Read the file again even if its metadata is unchanged.
                origin = finds.doubted() => {
                    if let Some(file) = seen.files.get_mut(Path::new(&origin.name)) {
                        file.stamp = None;
                    }
                }
            }
        }
    }
}

/// Polls all files and reads the changed ones.
fn look(path: &Path, policy: &Policy, before: &Seen) -> Result<Seen, LookError> {
    let unreadable = |source| LookError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let mut next = Seen::default();
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // A file that existed before is gone. A path that never existed may be a directory that is not
        // mounted yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound && before.file => {
            next.file = true;
            return Ok(next);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(LookError::Absent {
                path: path.to_owned(),
            });
        }
        Err(error) => return Err(unreadable(error)),
    };
    let mut paths = Vec::new();
    if metadata.is_file() {
        next.file = true;
        paths.push(path.to_owned());
    } else if metadata.is_dir() {
        for entry in fs::read_dir(path).map_err(unreadable)?.take(ENTRIES_MAX) {
            let entry = entry.map_err(unreadable)?.path();
            if is_named_like_one(&entry) {
                paths.push(entry);
            }
        }
    } else {
        return Err(LookError::Neither {
            path: path.to_owned(),
        });
    }
    // Sort the paths, so each poll selects the same files.
    paths.sort();
    for path in paths {
        let known = before.files.get(&path);
        let file = match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => continue,
            Ok(metadata) => {
                let stamp = Some(Stamp::of(&metadata));
                match known.filter(|known| known.stamp == stamp) {
                    Some(known) if known.settled => known.clone(),
                    known => File {
                        stamp,
                        settled: known.is_some(),
                        source: Arc::new(source(&path, read(&path, &metadata, policy))),
                    },
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => File {
                stamp: None,
                settled: false,
                source: Arc::new(source(&path, Err(unreadable_file(&path, &error)))),
            },
        };
        if next.files.len() == FILES_MAX {
            next.left_out = true;
            break;
        }
        next.files.insert(path, file);
    }
    Ok(next)
}

fn is_named_like_one(path: &Path) -> bool {
    let hidden = path
        .file_name()
        .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    let extension = path.extension().and_then(OsStr::to_str);
    !hidden && extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
}

fn source(path: &Path, access: Result<Sanitized, String>) -> Source {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let member = name.split('.').next().unwrap_or_default();
    Source {
        origin: Origin {
            kind: Kind::File,
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

fn read(path: &Path, metadata: &Metadata, policy: &Policy) -> Result<Sanitized, String> {
    // Opening a pipe would wait for a writer.
    if !metadata.is_file() {
        return Err(format!("{} is not a file", path.display()));
    }
    let read = || {
        let mut bytes = Vec::new();
        // Read one byte more than allowed to detect a file that is too large.
        let most = kubeconfig::SIZE_MAX as u64 + 1;
        fs::File::open(path)?.take(most).read_to_end(&mut bytes)?;
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
