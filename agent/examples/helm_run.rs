//! The executable for tests of the Helm driver.
//!
//! `helm_run -- helm args...` supervises Helm. `helm_run drive HELM SCRATCH SECONDS` runs a driver in a separate
//! process, which a test can kill. `SECONDS` limits the duration of its Helm run.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use krypton_helm::driver::{
    Helm, HelmConfig, HelmError, ReleaseTarget, StopHandle, Supervisor, Uninstall, supervise,
};
use krypton_helm::slots::priority::Priority;
use krypton_runtime::clock::BootTime;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1).peekable();
    if args.next_if(|word| word == "drive").is_none() {
        return supervise(args);
    }
    let [helm, scratch] =
        [args.next(), args.next()].map(|path| PathBuf::from(path.unwrap_or_default()));
    let seconds = args
        .next()
        .and_then(|seconds| seconds.to_str()?.parse().ok());
    let permit = Duration::from_secs(seconds.unwrap_or(60));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    match runtime.block_on(drive(helm, scratch, permit)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn drive(binary: PathBuf, scratch: PathBuf, permit: Duration) -> Result<(), HelmError> {
    let program = std::env::args_os().next().unwrap_or_default();
    let config = HelmConfig {
        binary,
        processes: Arc::new(Supervisor::new(program, &[])),
        private: scratch.with_file_name("private"),
        scratch,
        max_concurrent: 1,
        max_per_member: 1,
    };
    let helm = Helm::new(config).await?;
    let (handle, stop) = StopHandle::new();
    handle.permit(BootTime::now() + permit);
    let uninstall = Uninstall {
        target: ReleaseTarget {
            kubeconfig: PathBuf::from("/nowhere"),
            release: "small".to_owned(),
            namespace: "acme".to_owned(),
            cache_key: "edge-1".to_owned(),
        },
        timeout: Duration::from_secs(600),
        hooks: true,
    };
    let slot = helm.slot("edge-1", Priority::Low).await;
    helm.uninstall(slot, &uninstall, &stop).await
}
