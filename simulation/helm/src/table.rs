//! Compares the simulated Helm with Helm. Both run the same steps in separate namespaces of one API server, and must
//! leave the same objects, release Secrets, exit codes and errors.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use http::{Method, Request, header};
use kube::{Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::arguments::Invocation;
use crate::chart::TestChart;
use crate::run::{Exit, run};

pub mod cases;
mod gate;
mod shape;

use gate::Gate;

/// Result of a part of the comparison. The error is a text for the developer.
pub type Outcome<T> = Result<T, String>;

/// Where to run the comparison.
#[derive(Clone)]
pub struct Plane {
    /// Client with full access to an API server whose controllers run.
    pub client: Client,
    /// The Helm executable.
    pub helm: PathBuf,
    /// Start of all namespaces. A repeated run on the same API server needs another one.
    pub prefix: String,
}

impl std::fmt::Debug for Plane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plane")
            .field("helm", &self.helm)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// A sequence of steps.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub charts: Vec<TestChart>,
    pub steps: Vec<CaseStep>,
}

/// One step. `$NS` is the namespace.
#[derive(Clone, Debug)]
pub enum CaseStep {
    /// A Helm run. `$KUBECONFIG`, `$CHART0` and `$VALUES` are files.
    Helm {
        line: String,
        values: Value,
        interruption: Interruption,
    },
    /// A request by a different client.
    Write {
        method: Method,
        path: String,
        body: Value,
    },
}

/// Interruption of Helm at its nth write. The API server never gets this write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interruption {
    None,
    Kill(usize),
    Terminate(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HelmVariant {
    Real,
    Model,
}

/// Runs a case with both and compares after each step.
///
/// # Errors
/// Returns the differences.
pub async fn compare(plane: &Plane, case: &Case) -> Outcome<()> {
    let (real, model) = tokio::join!(
        Box::pin(run_case(plane, case, HelmVariant::Real)),
        Box::pin(run_case(plane, case, HelmVariant::Model)),
    );
    let (real, model) = (real?, model?);
    for (index, (real, model)) in real.iter().zip(&model).enumerate() {
        let differences = shape::differences(real, model);
        if !differences.is_empty() {
            return Err(format!(
                "case \"{}\", step {index}, as Helm ≠ model:\n{}",
                case.name,
                differences.join("\n")
            ));
        }
    }
    Ok(())
}

async fn run_case(plane: &Plane, case: &Case, variant: HelmVariant) -> Outcome<Vec<Value>> {
    let suffix = match variant {
        HelmVariant::Real => "real",
        HelmVariant::Model => "model",
    };
    let namespace = format!("{}-{}-{suffix}", plane.prefix, case.name.replace(' ', "-"));
    let body =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
    request(&plane.client, &Method::POST, "/api/v1/namespaces", &body).await?;
    let folder = TempDir::new().map_err(error_text)?;
    for (index, chart) in case.charts.iter().enumerate() {
        let path = folder.path().join(format!("chart{index}.tgz"));
        chart.to_tgz(&path).map_err(error_text)?;
    }
    let mut results = Vec::new();
    for step in &case.steps {
        let exit = match step {
            CaseStep::Write { method, path, body } => {
                let fill = |text: String| text.replace("$NS", &namespace);
                let body = fill(body.to_string());
                let body = serde_json::from_str(&body).map_err(error_text)?;
                let path = fill(path.clone());
                request(&plane.client, method, &path, &body).await?;
                json!({})
            }
            CaseStep::Helm {
                line,
                values,
                interruption,
            } => {
                let run = HelmRun {
                    plane,
                    folder: folder.path(),
                    namespace: &namespace,
                    interruption: *interruption,
                };
                let exit = Box::pin(run.start(line, values, variant)).await?;
                shape::exit(&exit)
            }
        };
        let state = shape::state(&plane.client, &namespace).await?;
        results.push(shape::without_namespace(
            &json!({ "exit": exit, "state": state }),
            &namespace,
        )?);
    }
    Ok(results)
}

fn error_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

async fn request(client: &Client, method: &Method, path: &str, body: &Value) -> Outcome<Value> {
    let media_type = match *method {
        Method::PATCH if path.contains("fieldManager=") => crate::api::APPLY,
        Method::PATCH => crate::api::MERGE,
        _ => "application/json",
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::CONTENT_TYPE, media_type)
        .body(body.to_string().into_bytes())
        .map_err(error_text)?;
    client
        .request(request)
        .await
        .map_err(|error| format!("{method} {path}: {error}"))
}

/// A run of Helm or of the model.
struct HelmRun<'a> {
    plane: &'a Plane,
    folder: &'a Path,
    namespace: &'a str,
    interruption: Interruption,
}

impl HelmRun<'_> {
    async fn start(&self, line: &str, values: &Value, variant: HelmVariant) -> Outcome<Exit> {
        let write_number = match self.interruption {
            Interruption::None => None,
            Interruption::Kill(write_number) | Interruption::Terminate(write_number) => {
                Some(write_number)
            }
        };
        let gate = Gate::start(self.plane.client.clone(), write_number).await?;
        let kubeconfig = self.folder.join("kubeconfig.json");
        let file = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "gate",
            "clusters": [{ "name": "gate", "cluster": { "server": gate.url() } }],
            "users": [{ "name": "gate", "user": {} }],
            "contexts": [{ "name": "gate", "context": { "cluster": "gate", "user": "gate" } }],
        });
        std::fs::write(&kubeconfig, file.to_string()).map_err(error_text)?;
        let values_file = self.folder.join("values.json");
        std::fs::write(&values_file, values.to_string()).map_err(error_text)?;
        let fill = |argument: &str| {
            let chart = |index: &str| self.folder.join(format!("chart{index}.tgz"));
            match argument {
                "$NS" => self.namespace.into(),
                "$KUBECONFIG" => kubeconfig.clone().into_os_string(),
                "$VALUES" => values_file.clone().into_os_string(),
                _ => match argument.strip_prefix("$CHART") {
                    Some(index) => chart(index).into_os_string(),
                    None => argument.into(),
                },
            }
        };
        let arguments = line.split_whitespace().map(fill).collect();
        match variant {
            HelmVariant::Real => self.run_real(arguments, gate).await,
            HelmVariant::Model => self.run_model(arguments, gate).await,
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the comparison belongs to the test harness"
    )]
    async fn run_real(&self, arguments: Vec<std::ffi::OsString>, mut gate: Gate) -> Outcome<Exit> {
        let home = self.folder.join("home");
        let mut command = Command::new(&self.plane.helm);
        command
            .args(arguments)
            .env_clear()
            .env("HOME", &home)
            .env("KUBECACHEDIR", home.join("cache"))
            .env("HELM_DRIVER", "secret")
            .env("GOMAXPROCS", "2")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let child = command.spawn().map_err(error_text)?;
        let pid = child.id().map(|pid| pid.to_string()).unwrap_or_default();
        let output = child.wait_with_output();
        let mut output = std::pin::pin!(output);
        let output = tokio::select! {
            output = &mut output => output,
            () = gate.reached() => {
                let signal = match self.interruption {
                    Interruption::Terminate(_) => "-TERM",
                    _ => "-KILL",
                };
                let killed = Command::new("kill").args([signal, &pid]).status().await;
                killed.map_err(error_text)?;
                output.await
            }
        };
        let output = output.map_err(error_text)?;
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        Ok(Exit {
            code: output
                .status
                .code()
                .unwrap_or_else(|| 128 + signal.unwrap_or_default()),
            stdout: output.stdout,
            stderr: output.stderr,
        })
    }

    async fn run_model(&self, arguments: Vec<std::ffi::OsString>, mut gate: Gate) -> Outcome<Exit> {
        let config = Config::new(gate.url().parse().map_err(error_text)?);
        let client = Client::try_from(config).map_err(error_text)?;
        let invocation = Invocation {
            arguments,
            environment: vec![("HELM_DRIVER".into(), "secret".into())],
        };
        let terminate = CancellationToken::new();
        let mut running = Box::pin(run(client, invocation, terminate.clone()));
        let exit = tokio::select! {
            exit = &mut running => exit,
            () = gate.reached() => match self.interruption {
                Interruption::Terminate(_) => {
                    terminate.cancel();
                    running.await
                }
                _ => Exit { code: 128 + 9, stdout: Vec::new(), stderr: Vec::new() },
            },
        };
        Ok(exit)
    }
}
