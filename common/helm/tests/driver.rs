//! Tests of the Helm driver with real processes. Shell scripts replace Helm. The driver treats them in the
//! same way.

#![allow(
    clippy::unwrap_used,
    reason = "this file is tests only, its helping functions included"
)]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use krypton_helm::driver::{
    DriverTimeouts, Helm, HelmConfig, HelmError, StopHandle, StopSignal, Supervisor, Uninstall,
    Upgrade,
};
use krypton_helm::slots::priority::Priority;
use krypton_runtime::clock::BootTime;
use krypton_runtime::off_thread;
use rustix::fs::Mode;
use serde_json::json;

#[path = "driver/stage.rs"]
mod stage;

use stage::{Stage, TEST_TIMEOUT, supervisor};

/// Much longer than any test. If a run ends earlier, something has ended it.
const FOREVER: &str = "1000000";

/// Returns a script with a child process. Both run forever and ignore SIGTERM.
fn stubborn() -> String {
    format!(
        "exec 3>pipe\ntrap '' TERM\nsh -c 'trap \"\" TERM; while :; do sleep {FOREVER}; done' &\n\
         echo started >&3\nwhile :; do sleep {FOREVER}; done"
    )
}

fn short_timeouts() -> DriverTimeouts {
    let short = Duration::from_millis(100);
    DriverTimeouts {
        beyond_timeout: short,
        after_deadline: short,
        after_stop: short,
    }
}

/// Runs `helm upgrade` with the next slot for edge-1.
async fn run_upgrade(
    helm: &Helm,
    upgrade: &Upgrade,
    stop: &StopSignal,
) -> Result<Option<String>, HelmError> {
    let slot = helm.slot("edge-1", Priority::Low).await;
    helm.upgrade(slot, upgrade, stop).await
}

/// Runs `helm uninstall` with the next slot for edge-1.
async fn run_uninstall(
    helm: &Helm,
    uninstall: &Uninstall,
    stop: &StopSignal,
) -> Result<(), HelmError> {
    let slot = helm.slot("edge-1", Priority::Low).await;
    helm.uninstall(slot, uninstall, stop).await
}

/// Runs `helm upgrade`, and acts once the script has started. Returns the rest of its output.
async fn upgrade_while(
    stage: &Stage,
    helm: &Helm,
    stop: &StopSignal,
    act: impl FnOnce(),
) -> (Result<Option<String>, HelmError>, String) {
    let upgrade = stage.upgrade();
    let acting = async {
        let output = stage.wait_for_start().await;
        act();
        output.rest().await
    };
    tokio::join!(run_upgrade(helm, &upgrade, stop), acting)
}

async fn uninstall_error(stage: &Stage, helm: &Helm) -> HelmError {
    let (_handle, stop) = StopHandle::new();
    let result = run_uninstall(helm, &stage.uninstall(), &stop).await;
    result.unwrap_err()
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[tokio::test]
async fn helm_gets_arguments_and_values_but_clean_environment() {
    let script = r#"
env >environment
printf '%s\n' "$@" >arguments
while [ "$1" != --values ]; do shift; done
cp "$2" values
stat -c %a "$2" "$(dirname "$2")" >modes
ls "$HELM_PLUGINS" >plugins
readlink /proc/self/fd/0 >stdin
"#;
    let stage = Stage::new(script).await;
    // The environment of the test process must not reach Helm.
    assert!(
        std::env::var_os("CARGO_MANIFEST_DIR").is_some(),
        "run it with cargo test"
    );
    let (_handle, stop) = StopHandle::new();
    let helm = stage.helm().await;
    run_upgrade(&helm, &stage.upgrade(), &stop).await.unwrap();

    let environment: BTreeMap<String, String> = stage
        .read("environment")
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    // Variables that the shell sets, and variables that the driver passes on if they are set.
    let inherited = [
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    ];
    let set_by_driver: Vec<&str> = environment
        .keys()
        .map(String::as_str)
        .filter(|name| !inherited.contains(name))
        .collect();
    let expected = [
        "GOGC",
        "GOMAXPROCS",
        "GOMEMLIMIT",
        "HELM_CACHE_HOME",
        "HELM_CONFIG_HOME",
        "HELM_DATA_HOME",
        "HELM_DRIVER",
        "HELM_NO_PLUGINS",
        "HELM_PLUGINS",
        "HOME",
        "KUBECACHEDIR",
        "NO_COLOR",
        "TMPDIR",
    ];
    assert_eq!(set_by_driver, expected);
    for (name, folder) in [
        ("HOME", "scratch"),
        ("KUBECACHEDIR", "scratch"),
        ("TMPDIR", "private"),
        ("HELM_PLUGINS", "scratch"),
        ("HELM_CACHE_HOME", "scratch"),
    ] {
        let folder = stage.path(folder);
        assert!(Path::new(&environment[name]).starts_with(folder), "{name}");
    }
    assert!(environment["KUBECACHEDIR"].ends_with("edge-1"));
    assert_eq!(stage.read("plugins"), "");
    assert_eq!(stage.read("stdin"), "/dev/null\n");

    let arguments = stage.read("arguments");
    assert!(arguments.starts_with("upgrade\n--install\n"), "{arguments}");
    let end = format!(
        "--\ntenant-acme-edge-1\n{}\n",
        stage.path("chart.tgz").display()
    );
    assert!(arguments.ends_with(&end), "{arguments}");
    assert!(arguments.contains("--description\na test\n"), "{arguments}");
    assert!(
        !arguments.contains("hunter2"),
        "values are never on the command line"
    );

    let values: serde_json::Value = serde_json::from_str(&stage.read("values")).unwrap();
    assert_eq!(
        values,
        json!({ "message": "hello", "db": { "password": "hunter2" } })
    );
    assert_eq!(stage.read("modes"), "600\n700\n");
    assert_eq!(
        entries(&stage.path("private/runs")),
        0,
        "the values are removed"
    );
}

#[tokio::test]
async fn failure_keeps_stderr_tail_and_redacts_secrets() {
    let script = "i=0; while [ $i -lt 3000 ]; do echo 'a warning that is repeated quite often' >&2; \
                  i=$((i+1)); done; echo 'Error: UPGRADE FAILED: no way, hunter2' >&2; exit 1";
    let stage = Stage::new(script).await;
    let (_handle, stop) = StopHandle::new();
    let helm = stage.helm().await;
    let error = run_upgrade(&helm, &stage.upgrade(), &stop)
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "helm upgrade of release tenant-acme-edge-1 failed: UPGRADE FAILED: no way, [redacted]"
    );
    assert!(!error.is_permanent());
    assert_eq!(
        entries(&stage.path("private/runs")),
        0,
        "the values are removed"
    );
}

/// `tail` buffers the whole line.
#[tokio::test]
async fn helm_that_takes_memory_without_end_is_ended() {
    let script = "if head -c 2G /dev/zero | tail >/dev/null 2>&1; then exit 0; fi\n\
                  echo 'fatal error: runtime: out of memory' >&2; exit 2";
    let stage = Stage::new(script).await;
    let (_handle, stop) = StopHandle::new();
    let helm = stage.helm().await;
    let error = run_upgrade(&helm, &stage.upgrade(), &stop).await;
    let error = error.unwrap_err();
    assert!(matches!(error, HelmError::OutOfMemory { .. }), "{error}");
    let expected = "exceeded 384 MiB of memory";
    assert!(error.to_string().contains(expected), "{error}");
}

#[tokio::test]
async fn missing_release_is_distinguished_from_other_failures() {
    let gone = "echo 'Error: uninstall: Release not loaded: a: release: not found' >&2; exit 1";
    let stage = Stage::new(gone).await;
    let helm = stage.helm().await;
    let error = uninstall_error(&stage, &helm).await;
    assert!(
        matches!(error, HelmError::ReleaseNotFound { .. }),
        "{error}"
    );
    drop(stage);

    let stage = Stage::new("echo 'Error: Kubernetes cluster unreachable' >&2; exit 1").await;
    let helm = stage.helm().await;
    let error = uninstall_error(&stage, &helm).await;
    assert!(matches!(error, HelmError::Failed { .. }), "{error}");
}

#[tokio::test]
async fn run_past_deadline_is_killed_with_descendants() {
    let stage = Stage::new(&stubborn()).await;
    let helm = stage.helm().await.with_timeouts(short_timeouts());
    let (_handle, stop) = StopHandle::new();
    let upgrade = Upgrade {
        timeout: Duration::ZERO,
        ..stage.upgrade()
    };
    let run = run_upgrade(&helm, &upgrade, &stop);
    // The deadline may pass before the script has started, so keep the pipe open.
    let pipe = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(stage.path("pipe"))
        .unwrap();
    let error = tokio::time::timeout(TEST_TIMEOUT, run)
        .await
        .unwrap()
        .unwrap_err();
    assert!(matches!(error, HelmError::TimedOut { .. }), "{error}");
    assert_no_writer_is_left(pipe, &stage.path("pipe"));
    assert_eq!(entries(&stage.path("private/runs")), 0);
}

/// A non-blocking read of the pipe returns its end immediately if no writer is left.
fn assert_no_writer_is_left(own: std::fs::File, path: &Path) {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
    let reader = rustix::fs::open(path, flags, Mode::empty()).unwrap();
    drop(own);
    let mut output = String::new();
    std::fs::File::from(reader)
        .read_to_string(&mut output)
        .expect("a writer is left");
}

#[tokio::test]
async fn helm_may_exit_gracefully_on_sigterm_at_deadline() {
    let script = format!(
        "exec 3>pipe\ntrap 'echo asked >&3; echo \"Error: cancelled\" >&2; kill $!; exit 1' TERM\n\
         sleep {FOREVER} & echo started >&3\nwait"
    );
    let stage = Stage::new(&script).await;
    let timeouts = DriverTimeouts {
        beyond_timeout: Duration::from_secs(1),
        after_deadline: TEST_TIMEOUT,
        after_stop: TEST_TIMEOUT,
    };
    let helm = stage.helm().await.with_timeouts(timeouts);
    let (_handle, stop) = StopHandle::new();
    let upgrade = Upgrade {
        timeout: Duration::ZERO,
        ..stage.upgrade()
    };
    let run = run_upgrade(&helm, &upgrade, &stop);
    let read_output = async { stage.wait_for_start().await.rest().await };
    let (error, output) = tokio::join!(run, read_output);
    let error = error.unwrap_err();
    assert_eq!(output, "asked\n");
    assert!(
        matches!(&error, HelmError::TimedOut { message, .. } if message == "cancelled"),
        "{error}"
    );
}

#[tokio::test]
async fn kill_ends_process_group_and_blocks_new_runs() {
    let stage = Stage::new(&stubborn()).await;
    let helm = stage.helm().await;
    let (handle, stop) = StopHandle::new();
    let kill = || {
        handle.kill();
        handle.permit(BootTime::now() + TEST_TIMEOUT);
    };
    let (result, output) = upgrade_while(&stage, &helm, &stop, kill).await;
    assert!(matches!(result, Err(HelmError::Stopped)), "{result:?}");
    assert_eq!(output, "");

    handle.kill();
    // A run would hang, because the test does not read the pipe.
    let result = run_upgrade(&helm, &stage.upgrade(), &stop).await;
    assert!(matches!(result, Err(HelmError::Stopped)), "{result:?}");
}

#[tokio::test]
async fn soft_stop_sends_sigterm_and_then_kills() {
    let script = format!(
        "exec 3>pipe\ntrap 'echo asked >&3' TERM\nsleep {FOREVER} & echo started >&3\nwhile :; do wait; done"
    );
    let stage = Stage::new(&script).await;
    let helm = stage.helm().await.with_timeouts(short_timeouts());
    let (handle, stop) = StopHandle::new();
    let (result, output) = upgrade_while(&stage, &helm, &stop, || handle.soft()).await;
    assert!(matches!(result, Err(HelmError::Stopped)), "{result:?}");
    assert_eq!(output, "asked\n");
}

#[tokio::test]
async fn a_soft_stop_lets_an_uninstall_end() {
    let script =
        "trap 'echo asked >&3; exit 1' TERM\nexec 3>pipe\necho started >&3\nread go <go\nexit 0";
    let stage = Stage::new(script).await;
    stage.create_pipe("go");
    let timeouts = DriverTimeouts {
        after_stop: TEST_TIMEOUT,
        ..DriverTimeouts::default()
    };
    let helm = stage.helm().await.with_timeouts(timeouts);
    let (handle, stop) = StopHandle::new();
    let uninstall = stage.uninstall();
    let run = run_uninstall(&helm, &uninstall, &stop);
    let stopped = async {
        let output = stage.wait_for_start().await;
        handle.soft();
        let go = stage.path("go");
        off_thread::start(move || std::fs::write(go, "go\n").unwrap())
            .await
            .unwrap();
        output.rest().await
    };
    let (result, output) = tokio::join!(run, stopped);
    result.unwrap();
    assert_eq!(output, "");
}

#[tokio::test]
async fn dropped_run_future_kills_helm() {
    let stage = Stage::new(&stubborn()).await;
    let helm = stage.helm().await;
    let (_handle, stop) = StopHandle::new();
    let upgrade = stage.upgrade();
    let run = run_upgrade(&helm, &upgrade, &stop);
    let output = tokio::select! {
        result = run => panic!("it ended by itself: {result:?}"),
        output = stage.wait_for_start() => output,
    };
    assert_eq!(output.rest().await, "");
}

#[tokio::test]
async fn helm_dies_with_a_driver_that_is_killed() {
    let stage = Stage::new(&stubborn()).await;
    let mut driver = start_driver(&stage, TEST_TIMEOUT);
    let output = stage.wait_for_start().await;
    driver.kill().await.unwrap();
    assert_eq!(output.rest().await, "");
    // The next driver finds and removes the files of the killed one.
    assert_eq!(entries(&stage.path("private/runs")), 1);
    stage.helm().await;
    assert_eq!(entries(&stage.path("private/runs")), 0);
}

#[allow(
    clippy::disallowed_methods,
    reason = "the process under test is one to be killed"
)]
fn start_driver(stage: &Stage, permit: Duration) -> tokio::process::Child {
    tokio::process::Command::new(supervisor())
        .arg("drive")
        .args([stage.path("helm"), stage.path("scratch")])
        .arg(permit.as_secs().to_string())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn helm_dies_at_deadline_while_driver_is_stopped() {
    let stage = Stage::new(&stubborn()).await;
    let driver = start_driver(&stage, Duration::from_secs(1));
    let pid = driver.id().unwrap();
    let output = stage.wait_for_start().await;
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    assert_eq!(output.rest().await, "");
}

#[tokio::test]
async fn run_continues_when_its_permit_is_extended() {
    let stage = Stage::new("exec 3>pipe\necho started >&3\nsleep 6\necho done >&3").await;
    let helm = stage.helm().await;
    let (handle, stop) = StopHandle::new();
    handle.permit(BootTime::now() + Duration::from_secs(5));
    let extend = || handle.permit(BootTime::now() + TEST_TIMEOUT);
    let (result, output) = upgrade_while(&stage, &helm, &stop, extend).await;
    result.unwrap();
    assert_eq!(output, "done\n");
}

#[tokio::test]
async fn run_with_expired_permit_is_not_started() {
    let stage = Stage::new(&stubborn()).await;
    let helm = stage.helm().await;
    let (handle, stop) = StopHandle::new();
    handle.permit(BootTime::default());
    let result = run_upgrade(&helm, &stage.upgrade(), &stop).await;
    assert!(matches!(result, Err(HelmError::Stopped)), "{result:?}");
}

#[tokio::test]
async fn leftover_helm_children_are_killed_on_exit() {
    let script = format!(
        "exec 3>pipe\nsh -c 'trap \"\" TERM; while :; do sleep {FOREVER}; done' >/dev/null 2>&1 &\n\
         echo started >&3\nexit 0"
    );
    let stage = Stage::new(&script).await;
    let helm = stage.helm().await;
    let (_handle, stop) = StopHandle::new();
    let uninstall = stage.uninstall();
    let run = run_uninstall(&helm, &uninstall, &stop);
    let read_output = async { stage.wait_for_start().await.rest().await };
    let (result, output) = tokio::join!(run, read_output);
    result.unwrap();
    assert_eq!(output, "");
}

#[tokio::test]
async fn killed_run_leaves_no_zombies_to_init() {
    // The subreaper is a setting of the whole process. It does not affect the other tests.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let script = format!(
        "exec 3>pipe\nsleep {FOREVER} & echo $$ $! >numbers\necho started >&3\nwhile :; do wait; done"
    );
    let stage = Stage::new(&script).await;
    let helm = stage.helm().await;
    let (handle, stop) = StopHandle::new();
    let (result, _) = upgrade_while(&stage, &helm, &stop, || handle.kill()).await;
    assert!(matches!(result, Err(HelmError::Stopped)), "{result:?}");
    let pids = std::fs::read_to_string(stage.path("numbers")).unwrap();
    let remaining: Vec<&str> = pids
        .split_whitespace()
        .filter(|pid| Path::new("/proc").join(pid).exists())
        .collect();
    assert_eq!(remaining, Vec::<&str>::new());
}

#[tokio::test]
async fn helm_concurrency_is_limited_and_slots_are_freed() {
    let stage = Stage::new("exec 3>pipe\necho started >&3\nexit 0").await;
    let config = HelmConfig {
        max_concurrent: 2,
        max_per_member: 2,
        ..stage.config()
    };
    let helm = Helm::new(config).await.unwrap();
    let (_handle, stop) = StopHandle::new();
    let (first, _second) = (
        helm.slot("edge-1", Priority::Low).await,
        helm.slot("edge-1", Priority::Low).await,
    );
    let mut third = std::pin::pin!(helm.slot("edge-1", Priority::Low));
    assert!(futures::poll!(third.as_mut()).is_pending());
    let uninstall = stage.uninstall();
    let (result, output) = tokio::join!(
        helm.uninstall(first, &uninstall, &stop),
        stage.wait_for_start()
    );
    result.unwrap();
    drop(output);
    assert!(futures::poll!(third).is_ready());
}

#[tokio::test]
async fn killed_and_unstartable_helm_are_distinguished() {
    let stage = Stage::new("kill -9 $$").await;
    let helm = stage.helm().await;
    let error = uninstall_error(&stage, &helm).await;
    assert!(
        matches!(error, HelmError::Killed { signal: 9, .. }),
        "{error}"
    );

    std::fs::remove_file(stage.path("helm")).unwrap();
    let error = uninstall_error(&stage, &helm).await;
    assert!(matches!(error, HelmError::Missing { .. }), "{error}");
    assert!(error.is_local(), "{error}");

    drop(stage);
    let stage = Stage::new("exit 0").await;
    let without_supervisor = HelmConfig {
        processes: Arc::new(Supervisor::new("/nowhere/krypton", &[])),
        ..stage.config()
    };
    let helm = Helm::new(without_supervisor).await.unwrap();
    let error = uninstall_error(&stage, &helm).await;
    assert!(matches!(error, HelmError::Spawn { .. }), "{error}");
}

#[tokio::test]
async fn unsupported_helm_version_is_rejected_with_remedy() {
    for (version, is_supported) in [
        ("v4.2.4", true),
        ("v4.3.1", true),
        ("v4.10.0", true),
        ("v4.2.3", false),
        ("v3.21.4", false),
        ("v5.0.0", false),
        ("rubbish", false),
    ] {
        let stage = Stage::with_version(version, "exit 0").await;
        match Helm::new(stage.config()).await {
            Ok(_) => assert!(is_supported, "{version}"),
            Err(error) => {
                assert!(!is_supported, "{version}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains(version) && text.contains("install Helm 4.2.4"),
                    "{text}"
                );
            }
        }
    }
    let stage = Stage::new("exit 0").await;
    let missing = HelmConfig {
        binary: "/nowhere/helm".into(),
        ..stage.config()
    };
    let error = Helm::new(missing).await.unwrap_err();
    assert!(
        error.to_string().contains("/nowhere/helm cannot be run"),
        "{error}"
    );
}

#[tokio::test]
async fn helm_binary_swap_loss_and_return_are_detected() {
    let (_handle, stop) = StopHandle::new();
    let stage = Stage::new("exit 0").await;
    let helm = stage.helm().await;
    let run = async || run_uninstall(&helm, &stage.uninstall(), &stop).await;
    run().await.unwrap();
    let moved = stage.path("away");
    std::fs::rename(stage.path("helm"), &moved).unwrap();
    let error = run().await.unwrap_err();
    assert!(matches!(error, HelmError::Missing { .. }), "{error}");
    let other = stage.path("other");
    std::fs::write(&other, "#!/bin/sh\necho v3.21.4\n").unwrap();
    let executable = std::fs::metadata(&moved).unwrap().permissions();
    std::fs::set_permissions(&other, executable).unwrap();
    std::fs::rename(&other, stage.path("helm")).unwrap();
    let error = run().await.unwrap_err();
    assert!(matches!(error, HelmError::Version { .. }), "{error}");
    std::fs::rename(&moved, stage.path("helm")).unwrap();
    run().await.unwrap();
}

#[tokio::test]
async fn missing_run_folder_is_recreated_and_unusable_reported() {
    let stage = Stage::new("exit 0").await;
    let helm = stage.helm().await;
    let values = serde_json::Map::new();
    let runs = stage.path("private").join("runs");
    std::fs::remove_dir_all(stage.path("private")).unwrap();
    helm.ready("edge-1", &values).await.unwrap();
    std::fs::remove_dir_all(&runs).unwrap();
    std::fs::write(&runs, "in the way").unwrap();
    let error = helm.ready("edge-1", &values).await.unwrap_err();
    assert!(error.is_local(), "{error}");
    assert!(error.to_string().contains("--cache-dir"), "{error}");
    std::fs::remove_file(&runs).unwrap();
    helm.ready("edge-1", &values).await.unwrap();
    assert_eq!(entries(&runs), 0);
}

#[tokio::test]
async fn undecodable_secret_is_distinguished_from_unreachable_cluster() {
    let (_handle, stop) = StopHandle::new();
    let damaged =
        "echo 'Error: get: failed to decode data \"sh.helm.release.v1.acme.v3\": EOF' >&2; exit 1";
    let unreachable = "echo 'Error: Kubernetes cluster unreachable' >&2; exit 1";
    for (script, expected) in [
        ("exit 0", Some(true)),
        (damaged, Some(false)),
        (unreachable, None),
    ] {
        let stage = Stage::new(script).await;
        let helm = stage.helm().await;
        let slot = helm.slot("edge-1", Priority::Low).await;
        let can_decode = helm.can_decode(slot, &stage.target(), 3, &stop).await;
        assert_eq!(can_decode.ok(), expected, "{script}");
    }
}
