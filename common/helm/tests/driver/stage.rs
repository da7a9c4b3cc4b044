//! Test folder with a shell script that replaces Helm, and a pipe for its output.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use krypton_helm::driver::{Helm, HelmConfig, ReleaseTarget, Supervisor, Uninstall, Upgrade};
use krypton_runtime::off_thread;
use rustix::fs::{FileType, Mode};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard};

/// Timeout of a hanging test. No successful test waits this long.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// The kernel may report a script as "busy" if another test forks while the script is written.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// A folder with a shell script that replaces Helm and writes to a pipe. The test reads the pipe, which
/// closes when every process that held it has exited.
pub(super) struct Stage {
    dir: TempDir,
    _guard: MutexGuard<'static, ()>,
}

impl Stage {
    pub(super) async fn new(script: &str) -> Self {
        Self::with_version("v4.3.1", script).await
    }

    pub(super) async fn with_version(version: &str, script: &str) -> Self {
        let guard = ONE_AT_A_TIME.lock().await;
        let dir = tempfile::tempdir().unwrap();
        let stage = Self { dir, _guard: guard };
        stage.create_pipe("pipe");
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = version ]; then echo {version}; exit; fi\ncd '{}' || exit 99\n{script}\n",
            stage.dir.path().display()
        );
        std::fs::write(stage.path("helm"), text).unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(stage.path("helm"), executable).unwrap();
        stage
    }

    pub(super) fn create_pipe(&self, name: &str) {
        let (path, mode) = (self.path(name), Mode::RUSR | Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, mode, 0).unwrap();
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub(super) fn config(&self) -> HelmConfig {
        HelmConfig {
            binary: self.path("helm"),
            processes: Arc::new(Supervisor::new(supervisor(), &[])),
            scratch: self.path("scratch"),
            private: self.path("private"),
            max_concurrent: 1,
            max_per_member: 1,
        }
    }

    pub(super) async fn helm(&self) -> Helm {
        Helm::new(self.config()).await.unwrap()
    }

    pub(super) fn target(&self) -> ReleaseTarget {
        ReleaseTarget {
            kubeconfig: self.path("kubeconfig"),
            release: "tenant-acme-edge-1".to_owned(),
            namespace: "acme".to_owned(),
            cache_key: "edge-1".to_owned(),
        }
    }

    pub(super) fn upgrade(&self) -> Upgrade {
        let values = json!({ "message": "hello", "db": { "password": "hunter2" } });
        Upgrade {
            target: self.target(),
            chart: self.path("chart.tgz"),
            values: values.as_object().unwrap().clone(),
            secret_paths: Vec::new(),
            labels: [("krypton.test/run".to_owned(), "7".to_owned())].into(),
            timeout: Duration::from_secs(600),
            server_side: true,
            skip_crds: false,
            history_max: 3,
            description: "a test".to_owned(),
            again: false,
        }
    }

    pub(super) fn uninstall(&self) -> Uninstall {
        Uninstall {
            target: self.target(),
            timeout: Duration::from_secs(600),
            hooks: true,
        }
    }

    /// Opens the pipe, waits until the script opens it too, and reads its first line.
    pub(super) async fn wait_for_start(&self) -> HelmOutput {
        let path = self.path("pipe");
        let opened = off_thread::start(move || {
            let mut output = HelmOutput(BufReader::new(std::fs::File::open(path).unwrap()));
            let mut line = String::new();
            output.0.read_line(&mut line).unwrap();
            assert_eq!(line, "started\n");
            output
        });
        tokio::time::timeout(TEST_TIMEOUT, opened)
            .await
            .expect("helm starts")
            .unwrap()
    }
}

/// The pipe to which the script writes.
pub(super) struct HelmOutput(BufReader<std::fs::File>);

impl HelmOutput {
    /// Returns the output until the last process that holds the pipe has exited.
    pub(super) async fn rest(mut self) -> String {
        let read = off_thread::start(move || {
            let mut text = String::new();
            self.0.read_to_string(&mut text).unwrap();
            text
        });
        tokio::time::timeout(TEST_TIMEOUT, read)
            .await
            .expect("all processes end")
            .unwrap()
    }
}

pub(super) fn supervisor() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("examples/helm_run");
    assert!(
        path.exists(),
        "{} is missing: cargo build --examples",
        path.display()
    );
    path
}
