//! Follows a file of settings on a mount that may hang.

use std::error::Error;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use krypton_types::error_chain::chain;
use tokio::sync::watch;

use crate::newest::SendIfChanged as _;
use crate::off_thread;

/// A mounted ConfigMap or Secret changes by swapped symlinks, which watches of a path miss.
pub const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// A read that takes longer counts as hung: its mount doesn't respond.
pub const DEADLINE: Duration = Duration::from_secs(10);
/// Size limit of a file, 1 MiB, equal to that of a Secret or ConfigMap.
pub const MAX_BYTES: u64 = 1024 * 1024;

/// A file that a flag names.
#[derive(Clone, Debug)]
pub struct SettingsFile {
    /// For messages.
    pub name: &'static str,
    /// The flag that names it.
    pub flag: &'static str,
    pub path: PathBuf,
}

/// Why a file is unusable. Never contains the file's content, which may be secret.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("reading the {} {} failed; correct {} or the file's permissions", .0.name, .0.path.display(), .0.flag)]
    Read(SettingsFile, #[source] io::Error),
    #[error("the {} {} does not respond within {} s; check whether its mount hangs", .0.name, .0.path.display(), DEADLINE.as_secs())]
    Hangs(SettingsFile),
    #[error("the {} {} is not a regular file; name a file with {}", .0.name, .0.path.display(), .0.flag)]
    NotAFile(SettingsFile),
    #[error("the {} {} is larger than 1 MiB; shorten it", .0.name, .0.path.display())]
    TooLarge(SettingsFile),
}

impl SettingsFile {
    /// Reads a regular file within its size limit.
    ///
    /// # Errors
    ///
    /// If the file can't be read, isn't regular, or is too large.
    pub fn read(&self) -> Result<Vec<u8>, FileError> {
        let failed = |source| FileError::Read(self.clone(), source);
        // Opening a pipe would wait for a writer.
        if !std::fs::metadata(&self.path).map_err(failed)?.is_file() {
            return Err(FileError::NotAFile(self.clone()));
        }
        let mut bytes = Vec::new();
        let file = std::fs::File::open(&self.path).map_err(failed)?;
        file.take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(FileError::TooLarge(self.clone()));
        }
        Ok(bytes)
    }

    /// Reads the file on a mount that may hang.
    ///
    /// # Errors
    ///
    /// As [`Self::read`], and if the mount doesn't respond in time.
    pub async fn read_with_deadline(&self) -> Result<Vec<u8>, FileError> {
        let file = self.clone();
        let read = with_deadline(DEADLINE, move || file.read()).await;
        read.unwrap_or_else(|| Err(FileError::Hangs(self.clone())))
    }
}

/// Sends the parsed content of `file` after each change to valid content. Logs invalid content once, and keeps the last
/// good content. Calls `on_hang` with a message while the file doesn't respond, and with `None` afterwards. Ends when
/// all receivers are dropped.
pub async fn follow_file<T: PartialEq, E: Error + From<FileError>>(
    file: SettingsFile,
    every: Duration,
    content_tx: watch::Sender<T>,
    parse: impl Fn(&Path, &[u8]) -> Result<T, E>,
    on_hang: impl Fn(Option<String>),
) {
    let (name, path) = (file.name, file.path.clone());
    let reader = file.clone();
    let read = move || reader.read();
    let on_hang = |is_hung: bool| {
        let problem = is_hung.then(|| FileError::Hangs(file.clone()).to_string());
        match &problem {
            Some(problem) => {
                tracing::error!(error = %problem, file = name, "failed to load a file; keeping its last content");
            }
            None => tracing::info!(path = %path.display(), file = name, "file is readable again"),
        }
        on_hang(problem);
    };
    let publish = |content: T| {
        if content_tx.send_if_changed(content) {
            tracing::info!(path = %path.display(), file = name, "file changed");
        }
    };
    let parse = |bytes: &[u8]| parse(&path, bytes);
    let following = follow(name, (every, DEADLINE), read, parse, publish, on_hang);
    tokio::select! {
        () = content_tx.closed() => {}
        () = following => {}
    }
}

async fn follow<T, E: Error + From<FileError>>(
    name: &'static str,
    (every, deadline): (Duration, Duration),
    read: impl Fn() -> Result<Vec<u8>, FileError> + Clone + Send + 'static,
    parse: impl Fn(&[u8]) -> Result<T, E>,
    publish: impl Fn(T),
    on_hang: impl Fn(bool),
) {
    let mut last = None;
    loop {
        let Some(content) = read_or_wait(deadline, read.clone(), &on_hang).await else {
            return; // the runtime is shutting down
        };
        let bytes_or_error = content
            .as_ref()
            .map(Vec::clone)
            .map_err(|error| chain(error));
        if last.as_ref() != Some(&bytes_or_error) {
            last = Some(bytes_or_error);
            match content.map_err(E::from).and_then(|bytes| parse(&bytes)) {
                Ok(content) => publish(content),
                Err(error) => {
                    tracing::error!(error = %chain(&error), file = name, "failed to load a file; keeping its last content");
                }
            }
        }
        tokio::time::sleep(every).await;
    }
}

/// Reads on a separate thread, which outlives `deadline` if its mount hangs. Returns `None` then.
pub async fn with_deadline<T: Send + 'static>(
    deadline: Duration,
    read: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let reading = off_thread::start(read);
    tokio::time::timeout(deadline, reading).await.ok()?.ok()
}

/// Reads on a separate thread. If the read takes longer than `deadline`, calls `on_hang(true)`, waits for the
/// same read, and then calls `on_hang(false)`. No second thread hangs on one mount. Returns `None` when the
/// runtime ends.
pub async fn read_or_wait<T: Send + 'static>(
    deadline: Duration,
    read: impl FnOnce() -> T + Send + 'static,
    on_hang: impl Fn(bool),
) -> Option<T> {
    let mut reading = off_thread::start(read);
    if let Ok(result) = tokio::time::timeout(deadline, &mut reading).await {
        return result.ok();
    }
    on_hang(true);
    let result = reading.await;
    on_hang(false);
    result.ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};

    use parking_lot::Mutex;

    use super::*;
    use crate::newest::NewestSeen as _;

    #[derive(Debug, thiserror::Error)]
    enum ParseError {
        #[error(transparent)]
        File(#[from] FileError),
        #[error("no number")]
        NoNumber,
    }

    fn number(bytes: &[u8]) -> Result<u32, ParseError> {
        let text = std::str::from_utf8(bytes).ok();
        text.and_then(|text| text.parse().ok())
            .ok_or(ParseError::NoNumber)
    }

    fn file(path: &Path) -> SettingsFile {
        SettingsFile {
            name: "test file",
            flag: "--test-file",
            path: path.to_owned(),
        }
    }

    #[test]
    fn only_regular_files_up_to_one_mebibyte_load() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let missing = file(&path).read().unwrap_err();
        assert!(matches!(missing, FileError::Read(..)), "{missing:?}");
        let folder = file(directory.path()).read().unwrap_err();
        assert!(matches!(folder, FileError::NotAFile(_)), "{folder:?}");

        let mut content = vec![b'x'; MAX_BYTES as usize];
        std::fs::write(&path, &content).unwrap();
        assert_eq!(file(&path).read().unwrap(), content);
        content.push(b'x');
        std::fs::write(&path, &content).unwrap();
        let error = file(&path).read().unwrap_err();
        assert!(matches!(error, FileError::TooLarge(_)), "{error:?}");
    }

    #[tokio::test]
    async fn valid_edit_is_loaded_and_invalid_one_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        // Change the file like a mounted Secret: swap the symlink, never the file.
        let swap = |content: &str, version: &str| {
            let file = directory.path().join(version);
            std::fs::write(&file, content).unwrap();
            let link = directory.path().join("link");
            std::os::unix::fs::symlink(&file, &link).unwrap();
            std::fs::rename(&link, &path).unwrap();
        };
        swap("1", "v1");
        let (tx, mut rx) = watch::channel(1);
        let parse = |_: &Path, bytes: &[u8]| number(bytes);
        let every = Duration::from_millis(5);
        let following = tokio::spawn(follow_file(file(&path), every, tx, parse, |_| {}));
        swap("2", "v2");
        rx.changed().await.unwrap();
        assert_eq!(rx.get_and_update(), 2);
        swap("no number", "v3");
        swap("4", "v4");
        rx.changed().await.unwrap();
        assert_eq!(rx.get_and_update(), 4);
        drop(rx);
        following.await.unwrap();
    }

    #[tokio::test]
    async fn each_content_is_judged_once() {
        let contents = [Ok("1"), Ok("1"), Ok("x"), Ok("x"), Ok("y"), Ok("1")];
        let contents = Mutex::new(contents.into_iter().chain([Err(()), Err(())]));
        let (end_tx, end_rx) = tokio::sync::oneshot::channel::<()>();
        let end_tx = Mutex::new(Some(end_tx));
        let read = Arc::new(move || match contents.lock().next() {
            Some(Ok(text)) => Ok(text.as_bytes().to_vec()),
            Some(Err(())) => Err(FileError::NotAFile(file(Path::new("test")))),
            None => {
                end_tx.lock().take();
                Ok(b"0".to_vec())
            }
        });
        let parsed = Mutex::new(Vec::new());
        let parse = |bytes: &[u8]| {
            parsed
                .lock()
                .push(String::from_utf8_lossy(bytes).into_owned());
            number(bytes)
        };
        let times = (Duration::from_millis(1), DEADLINE);
        let following = follow("test", times, move || read(), parse, |_| {}, |_| {});
        tokio::select! {
            _ = end_rx => {}
            () = following => {}
        }
        let parsed = parsed.lock();
        assert_eq!(parsed[..4], ["1", "x", "y", "1"]);
        assert!(parsed[4..].iter().all(|it| it == "0"), "{parsed:?}");
    }

    #[tokio::test]
    async fn hung_mount_is_reported_and_file_read_later() {
        // The mount responds once for each message.
        let (responses, mount) = mpsc::channel::<&'static [u8]>();
        let mount = Arc::new(Mutex::new(mount));
        let reads = Arc::new(AtomicUsize::new(0));
        let read = {
            let reads = Arc::clone(&reads);
            move || {
                reads.fetch_add(1, Ordering::SeqCst);
                let response = mount.lock().recv();
                Ok(response.unwrap_or_default().to_vec())
            }
        };
        let (hang_tx, mut hang_rx) = tokio::sync::mpsc::channel(8);
        let (content_tx, mut content_rx) = tokio::sync::mpsc::channel(8);
        let millis = Duration::from_millis;
        let following = tokio::spawn(follow(
            "test",
            (millis(1), millis(20)),
            read,
            number,
            move |number| content_tx.try_send(number).unwrap(),
            move |is_hung| hang_tx.try_send(is_hung).unwrap(),
        ));
        assert_eq!(hang_rx.recv().await, Some(true));
        assert_eq!(reads.load(Ordering::SeqCst), 1);
        responses.send(b"2").unwrap();
        assert_eq!(hang_rx.recv().await, Some(false));
        assert_eq!(content_rx.recv().await, Some(2));
        // The loop can be dropped while the mount hangs again.
        assert_eq!(hang_rx.recv().await, Some(true));
        following.abort();
        assert!(following.await.unwrap_err().is_cancelled());
        drop(responses);
    }

    #[tokio::test]
    async fn hung_read_ends_at_its_deadline() {
        let (sender, receiver) = mpsc::channel::<()>();
        let read = with_deadline(Duration::from_millis(10), move || receiver.recv());
        let result = tokio::time::timeout(Duration::from_secs(5), read).await;
        assert_eq!(result, Ok(None));
        drop(sender);
        assert_eq!(with_deadline(DEADLINE, || 1).await, Some(1));
    }
}
