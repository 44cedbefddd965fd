"""Training files that change between two runs in one folder."""

from megappo.checkpoint.checksums import file_sum
from megappo.observe.loggers import RunInfo
from megappo.observe.run_file import RunFile, changed_data


def test_a_resumed_run_reports_training_files_of_other_content(tmp_path):
    names = ["same.jsonl", "other.jsonl"]
    for name in names:
        (tmp_path / name).write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def line(resume_step: int) -> str:
        run = RunInfo(tmp_path, 9, resume_step, data=" ".join(file_sum(tmp_path / name) for name in names))
        found = changed_data(run)
        RunFile().on_start(run)
        return found

    assert line(resume_step=0) == line(resume_step=1) == ""
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n{"prompt": "c"}\n')
    assert "content of data.train_files" in line(resume_step=3) and line(resume_step=3) == ""
    (tmp_path / "other.jsonl").write_text('{"prompt": "d"}\n')
    assert line(resume_step=0) == "", "a new run in the folder"
