//! Compares the simulated Helm with Helm: both run the same steps in their own namespace of one API server, and
//! must leave the same objects, release Secrets, exit codes and errors.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use http::{Method, Request, header};
use kube::{Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::chart::TestChart;
use crate::run::{Exit, Invocation, run};

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
    pub name: &'static str,
    pub charts: Vec<TestChart>,
    pub steps: Vec<Step>,
}

/// One step. `$NS` is the namespace.
#[derive(Clone, Debug)]
pub enum Step {
    /// A Helm run. `$KUBECONFIG`, `$CHART0` and `$VALUES` are files.
    Helm {
        line: String,
        values: Value,
        interruption: Interruption,
    },
    /// A request of another client.
    Write {
        method: Method,
        path: String,
        body: Value,
    },
}

/// What happens to Helm at its nth write. The API server never gets this write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interruption {
    None,
    Kill(usize),
    Terminate(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum World {
    Real,
    Model,
}

/// Runs a case with both and compares after each step.
///
/// # Errors
/// Returns the differences.
pub async fn compare(plane: &Plane, case: &Case) -> Outcome<()> {
    let (real, model) = tokio::join!(
        Box::pin(play(plane, case, World::Real)),
        Box::pin(play(plane, case, World::Model)),
    );
    let (real, model) = (real?, model?);
    for (at, (real, model)) in real.iter().zip(&model).enumerate() {
        let differences = shape::differences(real, model);
        if !differences.is_empty() {
            return Err(format!(
                "case \"{}\", step {at}, as Helm ≠ model:\n{}",
                case.name,
                differences.join("\n")
            ));
        }
    }
    Ok(())
}

async fn play(plane: &Plane, case: &Case, world: World) -> Outcome<Vec<Value>> {
    let side = match world {
        World::Real => "real",
        World::Model => "model",
    };
    let namespace = format!("{}-{}-{side}", plane.prefix, case.name.replace(' ', "-"));
    let body =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
    request(&plane.client, &Method::POST, "/api/v1/namespaces", &body).await?;
    let folder = TempDir::new().map_err(text)?;
    for (at, chart) in case.charts.iter().enumerate() {
        let path = folder.path().join(format!("chart{at}.tgz"));
        chart.to_tgz(&path).map_err(text)?;
    }
    let mut seen = Vec::new();
    for step in &case.steps {
        let observed = match step {
            Step::Write { method, path, body } => {
                let fill = |text: String| text.replace("$NS", &namespace);
                let body = fill(body.to_string());
                let body = serde_json::from_str(&body).map_err(text)?;
                let path = fill(path.clone());
                request(&plane.client, method, &path, &body).await?;
                json!({})
            }
            Step::Helm {
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
                let exit = Box::pin(run.start(line, values, world)).await?;
                shape::exit(&exit)
            }
        };
        let state = shape::state(&plane.client, &namespace).await?;
        seen.push(shape::without_namespace(
            &json!({ "exit": observed, "state": state }),
            &namespace,
        )?);
    }
    Ok(seen)
}

fn text(error: impl std::fmt::Display) -> String {
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
        .map_err(text)?;
    client
        .request(request)
        .await
        .map_err(|error| format!("{method} {path}: {error}"))
}

/// A Helm run of one world.
struct HelmRun<'a> {
    plane: &'a Plane,
    folder: &'a Path,
    namespace: &'a str,
    interruption: Interruption,
}

impl HelmRun<'_> {
    async fn start(&self, line: &str, values: &Value, world: World) -> Outcome<Exit> {
        let at = match self.interruption {
            Interruption::None => None,
            Interruption::Kill(at) | Interruption::Terminate(at) => Some(at),
        };
        let gate = Gate::start(self.plane.client.clone(), at).await?;
        let kubeconfig = self.folder.join("kubeconfig.json");
        let file = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "gate",
            "clusters": [{ "name": "gate", "cluster": { "server": gate.url() } }],
            "users": [{ "name": "gate", "user": {} }],
            "contexts": [{ "name": "gate", "context": { "cluster": "gate", "user": "gate" } }],
        });
        std::fs::write(&kubeconfig, file.to_string()).map_err(text)?;
        let values_file = self.folder.join("values.json");
        std::fs::write(&values_file, values.to_string()).map_err(text)?;
        let fill = |word: &str| {
            let chart = |at: &str| self.folder.join(format!("chart{at}.tgz"));
            match word {
                "$NS" => self.namespace.into(),
                "$KUBECONFIG" => kubeconfig.clone().into_os_string(),
                "$VALUES" => values_file.clone().into_os_string(),
                _ => match word.strip_prefix("$CHART") {
                    Some(at) => chart(at).into_os_string(),
                    None => word.into(),
                },
            }
        };
        let arguments = line.split_whitespace().map(fill).collect();
        match world {
            World::Real => self.real(arguments, gate).await,
            World::Model => self.model(arguments, gate).await,
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the comparison belongs to the test harness"
    )]
    async fn real(&self, arguments: Vec<std::ffi::OsString>, mut gate: Gate) -> Outcome<Exit> {
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
        let child = command.spawn().map_err(text)?;
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
                killed.map_err(text)?;
                output.await
            }
        };
        let output = output.map_err(text)?;
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

    async fn model(&self, arguments: Vec<std::ffi::OsString>, mut gate: Gate) -> Outcome<Exit> {
        let config = Config::new(gate.url().parse().map_err(text)?);
        let client = Client::try_from(config).map_err(text)?;
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
